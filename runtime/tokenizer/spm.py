"""SentencePiece's BPE (`llama`): merges follow from the scores of the tokens they make.

The package `sentencepiece` reads models in a protocol buffer message, so one is written here from
the metadata. Its BPE joins the neighbours with the best score whatever their parts are; merges
rebuilt from scores, as `tokenizers` needs them, break ties differently.
"""

from __future__ import annotations

import struct

import sentencepiece

from ...errors import printable
from ...formats.tokenizer_hints import SPACE_PREFIX_KEY
from ...formats.values import get
from .text_model import SPACE, TextModel
from .vocabulary import PREFIX, TokenType, Vocabulary

_BPE = 2  # value of TrainerSpec.model_type
_SCORE, _TYPE = 2 << 3 | 5, 3 << 3  # tags of these fields of a piece: 4 bytes, a number


class SentencePiece(TextModel):
    """Encodes stretches of text that have no added tokens.

    A space is put in front of the text if `tokenizer.ggml.add_space_prefix`, and elsewhere as
    `SPACE_PREFIX_KEY` says.
    """

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        self.adds_space = vocabulary.flag(f"{PREFIX}add_space_prefix", True)
        scheme = get(vocabulary.metadata, SPACE_PREFIX_KEY, str, "", file=vocabulary.file)
        self._every_stretch = scheme in ("always", "metaspace-always")
        self._doubles = not scheme.startswith("metaspace")
        # User-defined pieces of the model itself, such as runs of spaces: they are recognized
        # after spaces are written as U+2581.
        self._own = {
            i
            for i, (token, type) in enumerate(zip(vocabulary.tokens, vocabulary.types))
            if type == TokenType.USER_DEFINED and SPACE in token
        }
        try:
            self._processor = sentencepiece.SentencePieceProcessor(
                model_proto=_model_proto(vocabulary, self._own)
            )
        except RuntimeError as error:
            raise vocabulary.error(
                f"the vocabulary is not a SentencePiece model: {printable(error)}"
            ) from None

    def encode(self, text: str, at_start: bool) -> list[int]:
        prefixed = self.adds_space and (at_start or self._every_stretch)
        if prefixed and (self._doubles or not text.startswith((" ", SPACE))):
            text = " " + text
        return self._processor.encode(text)

    def added(self, special: bool) -> dict[str, int]:
        return {token: i for token, i in super().added(special).items() if i not in self._own}


def _model_proto(vocabulary: Vocabulary, own: set[int]) -> bytes:
    """Return the `ModelProto` message of a vocabulary (sentencepiece_model.proto).

    Fields: ModelProto 1 pieces, 2 trainer_spec, 3 normalizer_spec; SentencePiece 1 piece, 2 score,
    3 type; TrainerSpec 3 model_type, 35 byte_fallback; NormalizerSpec 1 name,
    3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces.
    """
    byte_tokens = vocabulary.byte_tokens
    if byte_tokens and len(byte_tokens) < 256:
        raise vocabulary.error(f"the vocabulary has {len(byte_tokens)} of 256 byte tokens")
    score_and_type = struct.Struct("<BfBB")
    trainer = _number(3, _BPE) + _number(35, bool(byte_tokens))
    normalizer = _bytes(1, b"identity") + _number(3, False) + _number(4, False) + _number(5, True)
    pieces = b"".join(
        _bytes(1, _bytes(1, text.encode()) + score_and_type.pack(_SCORE, score, _TYPE, type))
        for text, score, type in _pieces(vocabulary, own)
    )
    return pieces + _bytes(2, trainer) + _bytes(3, normalizer)


def _pieces(vocabulary: Vocabulary, own: set[int]) -> list[tuple[str, float, int]]:
    """Return text, score and type of every token, as SentencePiece accepts them: exactly one is
    unknown, and no two are the same.

    Tokens that text cannot become here get the type of control tokens: added ones, which are
    recognized before, and padding.
    """
    byte_of = {i: byte for byte, i in vocabulary.byte_tokens.items()}
    unk = vocabulary.unknown()
    seen, pieces = set(), []
    for i, (token, type, score) in enumerate(
        zip(vocabulary.tokens, vocabulary.types, vocabulary.scores)
    ):
        if i in byte_of:
            token, type = f"<0x{byte_of[i]:02X}>", TokenType.BYTE
        elif i == unk:
            type = TokenType.UNKNOWN
        elif not (
            type == TokenType.NORMAL
            or i in own
            or (type == TokenType.UNUSED and token != f"[PAD{i}]")
        ):
            type = TokenType.CONTROL
        if not token or token in seen or "\0" in token:
            token, type = f"[token {i}]", TokenType.CONTROL
        seen.add(token)
        pieces.append((token, score, int(type)))
    return pieces


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value

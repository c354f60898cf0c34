"""SentencePiece's unigram model (`t5`): of all ways to cut a text, the most probable one.

Normalizing and cutting are those of transformers, by the package `tokenizers`.
"""

from __future__ import annotations

import tokenizers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import Unigram

from ...formats.values import get
from .charsmap import check_charsmap
from .text_model import SPACE, TextModel
from .vocabulary import PREFIX, TokenType, Vocabulary


class UnigramModel(TextModel):
    """Encodes stretches of text that have no added tokens. Each stretch gets a space in front if
    `tokenizer.ggml.add_space_prefix`.
    """

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        unk = vocabulary.unknown()
        byte_of = {i: byte for byte, i in vocabulary.byte_tokens.items()}
        plain = {
            f"<0x{byte_of[i]:02X}>" if i in byte_of else token: i
            for token, i in vocabulary.ids(TokenType.NORMAL, TokenType.BYTE).items()
        }
        plain.setdefault(vocabulary.tokens[unk], unk)
        self._ids = list(plain.values())
        pieces = [(token, vocabulary.scores[i]) for token, i in plain.items()]
        self._engine = tokenizers.Tokenizer(
            Unigram(
                pieces,
                unk_id=self._ids.index(unk),
                byte_fallback=bool(byte_of),
            )
        )
        if charsmap := _charsmap(vocabulary):
            self._engine.normalizer = normalizers.Precompiled(charsmap)
        self.adds_space = vocabulary.flag(f"{PREFIX}add_space_prefix", True)
        spaces = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="always" if self.adds_space else "never"
        )
        merges_spaces = vocabulary.flag(f"{PREFIX}remove_extra_whitespaces", False)
        self._engine.pre_tokenizer = (
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
            if merges_spaces
            else spaces
        )

    def encode(self, text: str, at_start: bool) -> list[int]:
        return [self._ids[k] for k in self._engine.encode(text, add_special_tokens=False).ids]


def _charsmap(vocabulary: Vocabulary) -> bytes:
    """Return the rules of Unicode normalization. Raise TokenizerError for damaged ones."""
    key = f"{PREFIX}precompiled_charsmap"
    items = get(vocabulary.metadata, key, list, [], file=vocabulary.file)
    if not all(isinstance(item, int) and -128 <= item < 256 for item in items):
        raise vocabulary.error(f"{key} holds something other than bytes")
    charsmap = bytes(item & 255 for item in items)
    if charsmap and (problem := check_charsmap(charsmap)):
        raise vocabulary.error(f"{key} {problem}")
    return charsmap

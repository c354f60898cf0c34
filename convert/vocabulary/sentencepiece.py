"""`tokenizer.model`: a SentencePiece model, parsed from its bytes (protocol buffer message
`ModelProto` of sentencepiece_model.proto).

Fields used: ModelProto 1 pieces, 2 trainer_spec, 3 normalizer_spec; SentencePiece 1 piece, 2 score,
3 type (default normal); TrainerSpec 3 model_type (1 unigram, 2 BPE, 3 word, 4 char); NormalizerSpec
2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, both true by default.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import MalformedFileError, NotFoundError, TruncatedFileError, UnsupportedTypeError
from ...formats.git_lfs import lfs_hint
from .tokens import MAX_TOKENS, NORMAL

MAX_FILE_BYTES = 1 << 28
UNIGRAM, BPE = 1, 2
_VARINT, _BYTES8, _BYTES, _BYTES4 = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceToken:
    """One piece of a SentencePiece model."""

    text: str
    score: float
    type: int  # 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte


@dataclass(frozen=True)
class SentencePieceModel:
    """What a `tokenizer.model` says."""

    pieces: list[SentencePieceToken]
    kind: int  # UNIGRAM or BPE
    add_dummy_prefix: bool  # a space is put before a text
    remove_extra_whitespaces: bool
    charsmap: bytes  # rules of Unicode normalization, compiled; empty for none


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read the model in `path`. Raise NotFoundError, TruncatedFileError or MalformedFileError with
    the position, UnsupportedTypeError for word and character models, which GGUF does not have.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise MalformedFileError(
                f"is {path.stat().st_size} bytes long; more than {MAX_FILE_BYTES} are not read",
                file=path,
            )
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror or error}", file=path) from None
    pieces: list[SentencePieceToken] = []
    trainer: dict[int, object] = {}
    normalizer: dict[int, object] = {}
    message = _Message(path, data, 0, len(data))
    for number, value in message.fields():
        if number not in (1, 2, 3):
            continue
        if not isinstance(value, _Message):
            raise message.malformed(f"field {number} is not a message")
        if number == 1:
            if len(pieces) == MAX_TOKENS:
                raise message.malformed(f"more than {MAX_TOKENS} pieces are not read")
            pieces.append(_piece(value))
        else:
            (trainer if number == 2 else normalizer).update(value.fields())
    if not pieces:
        raise message.malformed("has no pieces; it is not a SentencePiece model")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise UnsupportedTypeError(
            f"SentencePiece model type {kind} is not known to GGUF; unigram (1) and BPE (2) are",
            file=path,
        )
    charsmap = normalizer.get(2)
    return SentencePieceModel(
        pieces,
        kind,
        normalizer.get(3, 1) != 0,
        normalizer.get(4, 1) != 0,
        charsmap.bytes() if isinstance(charsmap, _Message) else b"",
    )


def _piece(message: _Message) -> SentencePieceToken:
    text, score, type = None, 0.0, NORMAL
    for number, value in message.fields():
        if number == 1 and isinstance(value, _Message):
            try:
                text = value.bytes().decode("utf-8")
            except UnicodeDecodeError:
                raise message.malformed("a piece is not UTF-8") from None
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int) and 1 <= value <= 6:
            type = value
        elif number in (1, 2, 3):
            raise message.malformed(f"field {number} of a piece has an impossible value")
    if text is None:
        raise message.malformed("a piece has no text")
    return SentencePieceToken(text, score, type)


class _Message:
    """Bytes [begin, end) of a file as a protocol buffer message or as a byte string: the wire
    format does not distinguish them.
    """

    def __init__(self, path: Path, data: bytes, begin: int, end: int):
        self._path, self._data, self._begin, self._end = path, data, begin, end

    def bytes(self) -> bytes:
        return self._data[self._begin : self._end]

    def malformed(self, problem: str) -> MalformedFileError:
        return MalformedFileError(problem, file=self._path, offset=self._begin)

    def fields(self) -> Iterator[tuple[int, object]]:
        """Yield field numbers and values: int, float (4 bytes) or `_Message`. Fields of 8 bytes are
        skipped.
        """
        position = self._begin
        while position < self._end:
            start = position
            key, position = self._varint(position)
            number, wire = key >> 3, key & 7
            if wire == _VARINT:
                value, position = self._varint(position)
                yield number, value
            elif wire == _BYTES:
                length, position = self._varint(position)
                self._check(position, length)
                yield number, _Message(self._path, self._data, position, position + length)
                position += length
            elif wire in (_BYTES4, _BYTES8):
                length = 4 if wire == _BYTES4 else 8
                self._check(position, length)
                if wire == _BYTES4:
                    yield number, struct.unpack_from("<f", self._data, position)[0]
                position += length
            else:
                raise MalformedFileError(
                    f"field {number} has wire type {wire}; it is not a SentencePiece model"
                    + lfs_hint(bytes(self._data[:64])),
                    file=self._path,
                    offset=start,
                )

    def _varint(self, position: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            self._check(position, 1)
            byte = self._data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, position
            shift += 7
            if shift > 63:
                raise MalformedFileError(
                    "a number is longer than 64 bits", file=self._path, offset=position
                )

    def _check(self, position: int, length: int) -> None:
        if length > self._end - position:
            raise TruncatedFileError(
                f"{length} bytes are needed, {self._end - position} follow",
                file=self._path,
                offset=position,
            )

"""Log-probabilities of a base model over a text, 16 bits each: what `--kl-divergence` compares
against. `compact_base` has a layout of a tenth of the size.

Layout, little-endian:

     0  `_logits_`
     8  i32 n_ctx, i32 n_vocab, i32 n_chunk
    20  i32[n_chunk * n_ctx] tokens of the text, before BOS takes its places
        then per chunk n_ctx - 1 - n_ctx/2 records of 2*ceil(n_vocab/2) + 4 u16 each:
        f32 scale, f32 min_log_prob, u16[n_vocab] codes, one unused u16 if n_vocab is odd

    log-probability = scale * code + min_log_prob
    logits further than 24 below the largest have code 0
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...errors import EvaluationError, MalformedFileError, NotFoundError, TruncatedFileError
from ...formats.output import PartFile
from .chunks import Chunks
from .scores import Compared, compare_all, log_sum_exp, row_slices

MAGIC = b"_logits_"
CLIP_DEPTH = 24.0  # ik_llama.cpp's; llama.cpp clips at 16. Files say nothing about it and need not
_HEADER = struct.Struct("<8s3i")


def record_length(n_vocab: int) -> int:
    """u16 per record."""
    return 2 * ((n_vocab + 1) // 2) + 4


def encode_records(logits: torch.Tensor) -> np.ndarray:
    """uint16[rows, record_length] for logits float32[rows, vocab]."""
    n_vocab = logits.shape[1]
    records = np.zeros((len(logits), record_length(n_vocab)), dtype="<u2")
    for rows in row_slices(len(logits)):
        z = logits[rows]
        top, lse = log_sum_exp(z)
        low = torch.maximum(z.min(dim=-1).values, top - CLIP_DEPTH)
        scale = (top - low) / 65535
        codes = ((z - low[:, None]) / scale[:, None]).round_().clamp_(0, 65535)  # ties to even
        codes[scale == 0] = 0
        head = torch.stack([scale, (low.double() - top.double() - lse).float()], dim=1)
        records[rows, :4] = head.cpu().numpy().astype("<f4").view("<u2")
        records[rows, 4 : 4 + n_vocab] = codes.to(torch.int32).cpu().numpy()
    return records


class BaseWriter:
    """Writes the records of one chunk after another. As a context manager: the file appears only
    when all are written.
    """

    def __init__(self, path: str | os.PathLike, chunks: Chunks, n_vocab: int):
        header = (
            _HEADER.pack(MAGIC, chunks.n_ctx, n_vocab, len(chunks))
            + chunks.tokens.astype("<i4").tobytes()
        )
        self._part = PartFile(
            path, len(header) + 2 * record_length(n_vocab) * chunks.n_scored * len(chunks)
        )
        try:
            self._part.write(header)
        except BaseException:
            self._part.abort()
            raise

    def write(self, logits: torch.Tensor) -> None:
        """float32[n_scored, vocab] of the next chunk."""
        self._part.write(encode_records(logits))

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(self, *exc) -> None:
        self._part.__exit__(*exc)


class BaseFile:
    """An opened base file. `tokens` int64[n_chunks, n_ctx]; `log_probabilities(w)` decodes one
    chunk.
    """

    def __init__(self, path: str | os.PathLike):
        """NotFoundError, MalformedFileError or TruncatedFileError naming what is wrong."""
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with open(self.path, "rb") as file:
                head = file.read(_HEADER.size)
        except FileNotFoundError:
            raise NotFoundError(
                "no such base file; make it with --kl-divergence-base alone first", file=path
            ) from None
        except OSError as error:
            raise EvaluationError(f"cannot be read: {error.strerror}", file=path) from None
        if not head.startswith(MAGIC):
            raise MalformedFileError(
                f"is not a base file of log-probabilities: it starts with {head[:8]!r}",
                file=path,
                offset=0,
            )
        if len(head) < _HEADER.size:
            raise TruncatedFileError(f"ends after {size} bytes, inside the header", file=path)
        _, self.n_ctx, self.n_vocab, self.n_chunks = _HEADER.unpack(head)
        check_counts(
            self.path,
            ("n_ctx", self.n_ctx, 4, 8),
            ("n_vocab", self.n_vocab, 1, 12),
            ("n_chunk", self.n_chunks, 1, 16),
        )
        self.n_scored = self.n_ctx - 1 - self.n_ctx // 2
        n_tokens, length = self.n_chunks * self.n_ctx, record_length(self.n_vocab)
        expected = _HEADER.size + 4 * n_tokens + 2 * length * self.n_scored * self.n_chunks
        if size < expected:
            raise TruncatedFileError(
                f"has {size} bytes, {self.n_chunks} chunks of {self.n_ctx} tokens and"
                f" {self.n_vocab} log-probabilities take {expected}",
                file=path,
            )
        self.tokens = read_tokens(self.path, _HEADER.size, self.n_chunks, self.n_ctx, self.n_vocab)
        self._records = np.memmap(
            self.path,
            "<u2",
            "r",
            _HEADER.size + 4 * n_tokens,
            (self.n_chunks, self.n_scored, length),
        )

    def records(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """scale float32[n_scored], min_log_prob float32[n_scored], codes uint16[n_scored, n_vocab]
        of one chunk. Raise MalformedFileError for a record that is not possible.
        """
        records = self._records[chunk]
        head = np.ascontiguousarray(records[:, :4]).view("<f4")
        if not np.isfinite(head).all():
            row = int(np.flatnonzero(~np.isfinite(head).all(axis=1))[0])
            raise MalformedFileError(
                f"chunk {chunk}, record {row}: scale {head[row, 0]} and minimum {head[row, 1]} are"
                " not finite",
                file=self.path,
            )
        return head[:, 0], head[:, 1], records[:, 4 : 4 + self.n_vocab]

    def log_probabilities(self, chunk: int) -> np.ndarray:
        """float32[n_scored, n_vocab]."""
        scale, low, codes = self.records(chunk)
        return scale[:, None] * codes.astype(np.float32) + low[:, None]

    def best(self, chunk: int, row: int, n: int) -> list[tuple[int, float]]:
        """Return the `n` most probable tokens of a record with their probabilities."""
        scale, low, codes = (part[row] for part in self.records(chunk))
        ids = np.argsort(-codes.astype(np.int64), kind="stable")[:n]
        return [(int(i), float(np.exp(scale * np.float32(codes[i]) + low))) for i in ids]

    def compare(self, chunk: int, logits: torch.Tensor, targets: np.ndarray) -> Compared:
        """Compare float32[n_scored, vocab] logits of a model with one chunk."""
        log_p = torch.from_numpy(self.log_probabilities(chunk))
        top = self.records(chunk)[2].argmax(axis=1)
        return compare_all(logits, log_p, top, targets)


def check_counts(path: Path, *counts: tuple[str, int, int, int]) -> None:
    """Raise MalformedFileError for a (name, value, least, offset) whose value is less."""
    for name, value, least, offset in counts:
        if value < least:
            raise MalformedFileError(
                f"{name} is {value}, expected at least {least}", file=path, offset=offset
            )


def holds_text(tokens: np.ndarray, text: Sequence[int]) -> bool:
    """Return whether the tokens of a base file, int64[n_chunks, n_ctx], are those that the tokens
    of a text begin with.
    """
    return len(text) >= tokens.size and bool((tokens.reshape(-1) == text[: tokens.size]).all())


def read_tokens(path: Path, offset: int, n_chunks: int, n_ctx: int, n_vocab: int) -> np.ndarray:
    """Return int64[n_chunks, n_ctx]. Raise MalformedFileError for one outside the vocabulary."""
    tokens = np.fromfile(path, "<i4", n_chunks * n_ctx, offset=offset)
    tokens = tokens.astype(np.int64).reshape(n_chunks, n_ctx)
    bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    if len(bad):
        raise MalformedFileError(
            f"token {tokens.flat[bad[0]]} is outside the vocabulary of {n_vocab}",
            file=path,
            offset=offset + 4 * int(bad[0]),
        )
    return tokens

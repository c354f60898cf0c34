"""A base file of a tenth of the size: of every scored token the most probable continuations, what
remains, and a sample of it.

Layout, little-endian, with K, S and the width of an id from `entries`:

     0  `iqklbase`
     8  i32 version (1), i32 n_ctx, i32 n_vocab, i32 n_chunk, i32 K, i32 S
    32  i32[n_chunk * n_ctx] tokens of the text, before BOS takes its places
        then per chunk n_ctx - 1 - n_ctx/2 records:
        f32 log-probability of the token that follows, f32 remainder,
        id[K] the most probable tokens, the first the most probable of all, id[S] the sample,
        u16[K] and u16[S] codes of their log-probabilities

    log-probability = 16 * (code / 65535 - 1); code 0: at most -16, does not count
    id: u16 if n_vocab is at most 65536, else u32

What follows from a record is exact or bounded:

- Perplexity of the base, correlation, ratio, Δp and the same top token: as from the base model
  itself, because the log-probability that they need is kept as a float32.
- KL divergence = sum of p (ln p - ln q) over tokens with ln p > -16, as in the other layout. The K
  tokens give their terms. Of all others with ln p > -16, whose probability is the remainder R, the
  S drawn with probability p / R (systematically, at a place that is fixed for every record) give
  R * mean(ln p - ln q): an estimate without bias, whose variance is at most about R^2 *
  var(ln p - ln q) / S. `Compared.variance` is that, from the terms themselves.
- By the log sum inequality the divergence is at least the terms of the K tokens plus R ln(R / Q), Q
  being what q leaves for other tokens: `Compared.least`.
- Codes are off by at most 8 / 65535 = 0.00012, and so is each of these figures on average, at most.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import torch

from ...errors import MalformedFileError, TruncatedFileError
from ...formats.output import PartFile
from .base_file import MAGIC as FULL_MAGIC
from .base_file import BaseFile, check_counts, read_tokens, record_length
from .chunks import Chunks
from .scores import LEAST_LOG_P, Compared, log_sum_exp, row_slices

MAGIC = b"iqklbase"
VERSION = 1
SHRINKS = 10  # times smaller than the other layout, for vocabularies of a thousand tokens or more
CODE_ERROR = -LEAST_LOG_P / 65535 / 2
_HEADER = struct.Struct("<8s6i")
_FEWEST, _LARGEST_SAMPLE = 16, 64
_GOLDEN = (5**0.5 - 1) / 2


def entries(n_vocab: int) -> tuple[int, int, np.dtype]:
    """Return K, S and the type of an id for a vocabulary."""
    id_type = np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")
    fit = (2 * record_length(n_vocab) // SHRINKS - 8) // (id_type.itemsize + 2)
    total = max(fit, _FEWEST)
    n_sample = min(max(total // 8, _FEWEST // 2), _LARGEST_SAMPLE)
    return min(total - n_sample, n_vocab), n_sample, id_type


def record_type(n_top: int, n_sample: int, id_type: np.dtype) -> np.dtype:
    """Return the dtype of the record of one scored token, with `n_top` and `n_sample` ids of
    `id_type`.
    """
    return np.dtype(
        [
            ("target", "<f4"),
            ("remainder", "<f4"),
            ("top", id_type, (n_top,)),
            ("sample", id_type, (n_sample,)),
            ("top_codes", "<u2", (n_top,)),
            ("sample_codes", "<u2", (n_sample,)),
        ]
    )


def encode_compact(logits: torch.Tensor, targets: np.ndarray, first: int = 0) -> np.ndarray:
    """Return one record for each row of float32[rows, vocab]; `first` is the number of the first
    record in the file.
    """
    n_vocab = logits.shape[1]
    n_top, n_sample, id_type = entries(n_vocab)
    records = np.zeros(len(logits), record_type(n_top, n_sample, id_type))
    wanted = torch.from_numpy(targets).to(logits.device)
    for rows in row_slices(len(logits)):
        z = logits[rows]
        top, lse = log_sum_exp(z)
        log_p = z - (top.double() + lse).float()[:, None]
        # The first maximum is the most probable token, also where several are equal.
        marked = z.scatter(1, z.argmax(dim=1, keepdim=True), torch.inf)
        ids = marked.topk(n_top, dim=1).indices
        p = log_p.double().exp().masked_fill(log_p <= LEAST_LOG_P, 0).scatter(1, ids, 0)
        sums = p.cumsum(dim=1)
        numbers = torch.arange(first + rows.start, first + rows.stop, dtype=torch.float64)
        starts = ((numbers + 1) * _GOLDEN % 1).to(z.device)[:, None]
        steps = torch.arange(n_sample, dtype=torch.float64, device=z.device)[None]
        places = (steps + starts) / n_sample * sums[:, -1:]
        drawn = torch.searchsorted(sums, places, right=True).clamp_(max=n_vocab - 1)
        out = records[rows]
        out["target"] = log_p.gather(1, wanted[rows, None])[:, 0].cpu().numpy()
        out["remainder"] = sums[:, -1].cpu().numpy()
        for name, chosen in (("top", ids), ("sample", drawn)):
            out[name] = chosen.cpu().numpy()
            codes = (log_p.gather(1, chosen).double() / -LEAST_LOG_P + 1) * 65535
            out[f"{name}_codes"] = codes.round().clamp_(0, 65535).cpu().numpy()
    return records


class CompactWriter:
    """Writes the records of one chunk after another, like `BaseWriter`."""

    def __init__(self, path: str | os.PathLike, chunks: Chunks, n_vocab: int):
        n_top, n_sample, id_type = entries(n_vocab)
        numbers = (VERSION, chunks.n_ctx, n_vocab, len(chunks), n_top, n_sample)
        header = _HEADER.pack(MAGIC, *numbers) + chunks.tokens.astype("<i4").tobytes()
        size = record_type(n_top, n_sample, id_type).itemsize
        self._part = PartFile(path, len(header) + size * chunks.n_scored * len(chunks))
        self._chunks, self._done = chunks, 0
        try:
            self._part.write(header)
        except BaseException:
            self._part.abort()
            raise

    def write(self, logits: torch.Tensor) -> None:
        """float32[n_scored, vocab] of the next chunk."""
        n_scored = self._chunks.n_scored
        targets = self._chunks.targets(self._done)
        self._part.write(encode_compact(logits, targets, self._done * n_scored))
        self._done += 1

    def __enter__(self) -> CompactWriter:
        return self

    def __exit__(self, *exc) -> None:
        self._part.__exit__(*exc)


class CompactBase:
    """An opened compact base file. `tokens` int64[n_chunks, n_ctx]."""

    def __init__(self, path: str | os.PathLike):
        """MalformedFileError or TruncatedFileError naming what is wrong."""
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise TruncatedFileError(f"ends after {size} bytes, inside the header", file=path)
        _, version, self.n_ctx, self.n_vocab, self.n_chunks, n_top, n_sample = _HEADER.unpack(head)
        if version != VERSION:
            raise MalformedFileError(
                f"is a compact base file of version {version}, expected {VERSION}",
                file=path,
                offset=8,
            )
        check_counts(
            self.path,
            ("n_ctx", self.n_ctx, 4, 12),
            ("n_vocab", self.n_vocab, 1, 16),
            ("n_chunk", self.n_chunks, 1, 20),
            ("K", n_top, 1, 24),
            ("S", n_sample, 1, 28),
        )
        if n_top > self.n_vocab:
            raise MalformedFileError(
                f"K is {n_top}, the vocabulary has {self.n_vocab} tokens", file=path, offset=24
            )
        self.n_scored = self.n_ctx - 1 - self.n_ctx // 2
        n_tokens = self.n_chunks * self.n_ctx
        record = record_type(n_top, n_sample, entries(self.n_vocab)[2])
        start = _HEADER.size + 4 * n_tokens
        expected = start + record.itemsize * self.n_scored * self.n_chunks
        if size < expected:
            raise TruncatedFileError(
                f"has {size} bytes, {self.n_chunks} chunks of {self.n_ctx} tokens take {expected}",
                file=path,
            )
        self.tokens = read_tokens(self.path, _HEADER.size, self.n_chunks, self.n_ctx, self.n_vocab)
        self._records = np.memmap(self.path, record, "r", start, (self.n_chunks, self.n_scored))

    def records(self, chunk: int) -> np.ndarray:
        """Return the records of one chunk. MalformedFileError for values that cannot be."""
        records = self._records[chunk]
        target, remainder = records["target"], records["remainder"]
        wrong = ~(np.isfinite(target) & (remainder >= 0) & (remainder < 1.01))
        wrong |= (records["top"] >= self.n_vocab).any(axis=1)
        wrong |= (records["sample"] >= self.n_vocab).any(axis=1)
        if wrong.any():
            raise MalformedFileError(
                f"chunk {chunk}, record {int(np.flatnonzero(wrong)[0])}: a probability or a token"
                " cannot be",
                file=self.path,
            )
        return records

    def best(self, chunk: int, row: int, n: int) -> list[tuple[int, float]]:
        """Return the `n` most probable tokens of a record (at most K) with their probabilities."""
        record = self.records(chunk)[row]
        log_p = LEAST_LOG_P * (1 - record["top_codes"][:n].astype(np.float64) / 65535)
        return list(zip(record["top"][:n].tolist(), np.exp(log_p).tolist(), strict=True))

    def compare(self, chunk: int, logits: torch.Tensor, targets: np.ndarray) -> Compared:
        """Compare float32[n_scored, vocab] logits of a model with one chunk. Tokens of the base
        that the model does not have do not count.
        """
        records, parts = self.records(chunk), []
        wanted = torch.from_numpy(targets).to(logits.device)
        for rows in row_slices(len(logits)):
            z, of_base = logits[rows], records[rows]
            top, lse = log_sum_exp(z)
            shift = (top.double() + lse)[:, None]
            nll = (shift - z.gather(1, wanted[rows, None]))[:, 0]
            log_p, log_q = _both(of_base, "top", z, shift)
            counts = (log_p > LEAST_LOG_P) & log_q.isfinite()
            terms = (log_p.exp() * (log_p - log_q)).masked_fill_(~counts, 0).sum(dim=1)
            remainder = torch.from_numpy(of_base["remainder"].astype(np.float64)).to(z.device)
            left = (1 - log_q.exp().sum(dim=1)).clamp_(min=1e-12)
            log_p, log_q = _both(of_base, "sample", z, shift)
            ratios = (log_p - log_q).masked_fill_(~log_q.isfinite(), 0)
            least = terms + torch.special.xlogy(remainder, remainder / left)
            variance = remainder**2 * ratios.var(dim=1) / ratios.shape[1]
            values = (nll, terms + remainder * ratios.mean(dim=1), least, variance, z.argmax(dim=1))
            parts.append([value.cpu().numpy() for value in values])
        nll, kld, least, variance, top_q = map(np.concatenate, zip(*parts, strict=True))
        same_top = top_q == records["top"][:, 0]
        return Compared(nll, -records["target"].astype(np.float64), kld, same_top, least, variance)


def _both(
    records: np.ndarray, name: str, z: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 ln p and ln q of the tokens of a field; ln q is -inf outside the model's
    vocabulary.
    """
    ids = torch.from_numpy(records[name].astype(np.int64)).to(z.device)
    codes = torch.from_numpy(records[f"{name}_codes"].astype(np.float64)).to(z.device)
    log_q = z.gather(1, ids.clamp(max=z.shape[1] - 1)).double() - shift
    return LEAST_LOG_P * (1 - codes / 65535), log_q.masked_fill_(ids >= z.shape[1], -torch.inf)


def open_base(path: str | os.PathLike) -> BaseFile | CompactBase:
    """Open a base file of either layout. NotFoundError, MalformedFileError or TruncatedFileError
    naming what is wrong.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(len(MAGIC))
    except OSError:
        magic = FULL_MAGIC  # it has the words for what is wrong
    return CompactBase(path) if magic == MAGIC else BaseFile(path)

"""Importance matrices in memory: for each weight, the mean squared input of every column on a
calibration text.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import ImatrixError, printable
from ..formats.tensor_names import TOKEN_EMBEDDING, TensorName

log = logging.getLogger(__name__)

# What replaces a missing entry: these weights see the same input (gate and up of a layer) or, in
# multi-head latent attention, a related one: attn_kv_b sees the latent vectors, attn_v_b of each
# head a mean of them, weighted by its attention. In order of preference, as in ik_llama.cpp.
_ALTERNATIVES = {
    "ffn_gate_exps": ("ffn_gate_up_exps.weight", "ffn_up_exps.weight"),
    "ffn_up_exps": ("ffn_gate_up_exps.weight", "ffn_gate_exps.weight"),
    "ffn_gate_up_exps": ("ffn_up_exps.weight", "ffn_gate_exps.weight"),
    "ffn_gate": ("ffn_up.weight",),
    "attn_v_b": ("attn_kv_b.weight",),
    "attn_kv_b": ("attn_v_b.weight",),
}
_VALUES_OF_LATENT = ("attn_v_b", "attn_kv_b")


@dataclass
class Entry:
    """The statistics of one tensor: `sums` float64[n_matrices, n_cols] of squared inputs, `counts`
    int64[n_matrices] of input rows.

    An entry of a file reads its sums at every access (`stored.StoredEntry`). `calls`: the number of
    evaluations that the sums come from, for the `.dat` layout, if the counts do not give it (see
    `merge.merge_imatrices`).
    """

    sums: np.ndarray
    counts: np.ndarray
    calls: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_matrices, n_cols)."""
        return self.sums.shape

    @property
    def size(self) -> int:
        """Values of the entry: matrices times columns."""
        return self.shape[0] * self.shape[1]

    def matrices(self, n: int) -> Entry:
        """Return `n` matrices of equal size; a single count is that of every matrix."""
        return Entry(self.sums.reshape(n, -1), np.broadcast_to(self.counts, n), self.calls)

    @property
    def means(self) -> np.ndarray:
        """Return float64[n_matrices, n_cols]; ones for a matrix that saw nothing."""
        seen = self.counts[:, None] > 0
        return np.where(seen, self.sums / np.maximum(self.counts[:, None], 1), 1.0)

    def whole(self) -> Entry:
        """Return the same means with whole counts, if weights have made them fractions. None
        becomes 0.
        """
        counts = np.where(self.counts > 0, np.maximum(1, np.rint(self.counts)), 0)
        scale = counts / np.where(self.counts > 0, self.counts, 1)
        return Entry(self.sums * scale[:, None], counts.astype(np.int64), self.calls)

    @property
    def n_missing(self) -> int:
        """Return the number of matrices that saw nothing."""
        return int((self.counts == 0).sum())


@dataclass(repr=False)
class Imatrix:
    """Entries by tensor name, and how they were collected: `chunk_count` chunks of `chunk_size`
    tokens of `datasets`.

    Counts are rows (tokens) if the file has them. The legacy layout only has evaluation calls: then
    `chunk_size` is 1, counts are calls, and the entry of a tensor of experts is one matrix (see
    `experts.with_experts`). kind: what the entries were read from, for messages.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    chunk_count: int = 0
    chunk_size: int = 1
    datasets: tuple[str, ...] = ()
    path: str | None = None
    kind: str = "the importance matrix"

    def __repr__(self) -> str:
        """Say what `contents` says, and the path, in a line."""
        path = "" if self.path is None else f": {printable(self.path, 400)}"
        return f"<Imatrix {self.contents}{path}>"

    @property
    def contents(self) -> str:
        """Return the number of entries and what they were collected from, as "35 entries from 1
        chunk of 512 tokens".
        """
        of = "" if self.counts_calls else f" of {self.chunk_size} tokens"
        entries = f"{len(self.entries)} entr{'y' if len(self.entries) == 1 else 'ies'}"
        chunks = f"{self.chunk_count} chunk{'s' * (self.chunk_count != 1)}"
        return f"{entries} from {chunks}{of}"

    @property
    def counts_calls(self) -> bool:
        """Return whether counts are evaluation calls, of unknown size."""
        return self.chunk_size <= 1

    def whole(self) -> Imatrix:
        """Return the matrix with whole counts, see `Entry.whole`."""
        return replace(self, entries={name: entry.whole() for name, entry in self.entries.items()})

    def importance(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return float32[n_matrices, n_cols], the mean squared input of every column of tensor
        `name` with numpy-order `shape`; None if `entry` is None.

        A matrix that saw nothing gets ones. Raise the errors of `entry`.
        """
        found = self.entry(name, shape)
        return None if found is None else found.means.astype(np.float32)

    def digest(self) -> str:
        """Return the SHA-256 of all entries, in hexadecimal."""
        total = hashlib.sha256()
        for name, entry in sorted(self.entries.items()):
            total.update(f"{name} {entry.sums.shape}".encode())
            total.update(np.ascontiguousarray(entry.sums).data)
            total.update(np.ascontiguousarray(entry.counts).data)
        return total.hexdigest()

    def entry(self, name: str, shape: tuple[int, ...]) -> Entry | None:
        """Return the entry for tensor `name`, as [n_matrices, n_cols] of `shape`, or None if
        neither the tensor nor one with the same input has an entry. Nothing is computed.

        Raise ImatrixError if the entry has another size. For the token embedding, which is looked
        up and not multiplied, this is only logged.
        """
        found = self.find(name)
        if found is None:
            return None
        n_cols, n_matrices = shape[-1], int(np.prod(shape[:-2], dtype=np.int64))
        entry = self.entries[found]
        fits = entry.size == n_cols * n_matrices
        if not fits and entry.size % n_cols == 0 and TensorName.parse(name).is_latent:
            return _of_heads(entry.matrices(entry.size // n_cols), n_matrices)
        if not fits or len(entry.counts) not in (1, n_matrices):
            message = (
                f"{self.kind} has {entry.size} values in {len(entry.counts)} matrices,"
                f" shape {list(shape)} needs {n_cols} in each of {n_matrices}"
            )
            if name == TOKEN_EMBEDDING:
                log.warning("%s: %s; it is not used", name, message)
                return None
            raise ImatrixError(message, file=self.path, tensor=name)
        return entry.matrices(n_matrices)

    def find(self, name: str) -> str | None:
        """Return the name of the entry for tensor `name`: its own, or that of a tensor with the
        same input; None if there is neither.
        """
        if name in self.entries:
            return name
        return next((other for other in alternatives(name) if other in self.entries), None)


def sees_latent_vectors(name: str) -> bool:
    """Return whether the entry of a tensor may be of another size: that of the latent vectors of
    attention, or of their means for each head, depending on who collected it.
    """
    parsed = TensorName.parse(name)
    return parsed.is_weight and parsed.role in _VALUES_OF_LATENT


def alternatives(name: str) -> list[str]:
    """Return the tensors whose entries can replace that of tensor `name`, the best first."""
    parsed = TensorName.parse(name)
    others = _ALTERNATIVES.get(parsed.role, ()) if parsed.is_weight else ()
    return [parsed.sibling(other) for other in others]


def _of_heads(entry: Entry, n: int) -> Entry:
    """Return the sum over all matrices of `entry` as that of each of `n` matrices: attn_kv_b has
    one matrix for all heads, attn_k_b and attn_v_b have one for each (in files of ik_llama.cpp with
    their rows in one matrix).
    """
    sums, count = entry.sums.sum(axis=0), int(entry.counts.sum())
    return Entry(np.broadcast_to(sums, (n, len(sums))), np.full(n, count), entry.calls)


@dataclass(frozen=True)
class Snapshot:
    """The state of an unfinished run after `imatrix.chunk_count` chunks, to resume it. Counts may
    be fractions (`Entry.whole`).

    sums: float64 arrays next to the entries.
    """

    imatrix: Imatrix
    sums: dict[str, np.ndarray]

    def of(self, name: str, n: int) -> np.ndarray:
        """Return the `n` sums called `name`. Raise ImatrixError if there are none, or another
        number.
        """
        found = self.sums.get(name, np.zeros(0))
        if len(found) != n:
            raise ImatrixError(
                f"has {len(found)} sums '{name}', expected {n}", file=self.imatrix.path
            )
        return found


def check_values(values: np.ndarray, name: str, path: str | None) -> None:
    """Raise ImatrixError if sums of squares are not finite or negative."""
    if not np.isfinite(values).all():
        raise ImatrixError(
            f"value {int(np.flatnonzero(~np.isfinite(values.ravel()))[0])} is not finite",
            file=path,
            tensor=name,
        )
    if (values < 0).any():
        bad = int(np.flatnonzero(values.ravel() < 0)[0])
        raise ImatrixError(
            f"value {bad} is {values.ravel()[bad]:g}, but sums of squares are not negative",
            file=path,
            tensor=name,
        )


def as_float32(values: np.ndarray, name: str, path: str | os.PathLike) -> np.ndarray:
    """Return `values` as files store them. Raise ImatrixError if one is too large."""
    with np.errstate(over="ignore"):
        found = values.astype("<f4")
    if not np.isfinite(found).all():
        raise ImatrixError(
            f"a value is {values.max():g}, which 32 bits do not hold", file=path, tensor=name
        )
    return found


def check_count(count: int, most: int, what: str, path: str | os.PathLike) -> int:
    """Return `count`. Raise ImatrixError if it does not fit its field in the file."""
    if not 0 <= count <= most:
        raise ImatrixError(f"the {what} would be {count}, expected at most {most}", file=path)
    return count

"""Matrices on the CPU: they stay encoded in the file and are decoded when they are used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...formats.source import TensorInfo
from ...formats.types import GGMLType
from .kept import Multiplication, gathered, kept_rows, products_of_each
from .matrix import FEW_ROWS, FEW_ROWS_ONCE
from .placement import CPU
from .rounded import RoundedRows, can_be_rounded, packed, packed_bytes

if TYPE_CHECKING:
    from ..simd.products import Rows
    from .store import TensorStore

DEFAULT_CACHE_BYTES = 512 * 2**20
SLICE_BYTES = 32 * 2**20  # of float32, for matrices that do not fit the cache


class DecodeCache:
    """Decoded matrices of at most `capacity` bytes in total; the least recently used are dropped
    first.
    """

    def __init__(self, capacity: int = DEFAULT_CACHE_BYTES):
        self.capacity, self.used = capacity, 0
        self._entries: OrderedDict[tuple, torch.Tensor] = OrderedDict()

    def get(self, key: tuple, n_bytes: int, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the matrix `key` of `n_bytes` (at most `capacity`), decoded if necessary."""
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            return found
        # Before decoding, so that old and new do not exist together.
        while self.used + n_bytes > self.capacity:
            _, dropped = self._entries.popitem(last=False)
            self.used -= dropped.nbytes
            del dropped
        decoded = decode()
        self._entries[key] = decoded
        self.used += decoded.nbytes
        return decoded

    def drop(self, name: str) -> None:
        """Forget the matrices of tensor `name`."""
        for key in [key for key in self._entries if key[0] == name]:
            self.used -= self._entries.pop(key).nbytes


class Matrix:
    """A 2-D matrix of `rows` x `cols` within a stored tensor, on the CPU: read from the file and
    decoded to float32 on demand.
    """

    device, packed, stacked = CPU, None, ()

    def __init__(self, store: TensorStore, tensor: TensorInfo, index: int = 0):
        self.tensor = tensor
        self.rows, self.cols = tensor.shape[-2], tensor.shape[-1]
        self.index = index
        self._store, self._first, self._key = store, index * self.rows, (tensor.name, index)
        self._multiply: Multiplication | None = None

    @property
    def type(self) -> GGMLType:
        """The type that the file stores."""
        return self.tensor.type

    @property
    def stored_bytes(self) -> int:
        """Bytes of the matrix in the file."""
        return self.tensor.n_bytes // self.tensor.n_matrices

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces (first row, float32[rows, cols]) that cover the matrix: all of it from the cache,
        or slices decoded now if it is too large.
        """
        n_bytes, cache = 4 * self.rows * self.cols, self._store.cache
        if n_bytes <= cache.capacity:
            yield 0, cache.get(self._key, n_bytes, lambda: self.decode(0, self.rows))
            return
        group = self.tensor.type.group_rows
        step = max(1, SLICE_BYTES // (4 * self.cols * group)) * group
        for start in range(0, self.rows, step):
            yield start, self.decode(start, min(start + step, self.rows))

    def kept_tensor(self) -> Rows | None:
        """Return the rows of the whole tensor, see `TensorStore.kept`."""
        return self._store.kept(self.tensor)

    def kept(self) -> Rows | None:
        """Return the rows of the matrix within `kept_tensor`."""
        whole = self.kept_tensor()
        return None if whole is None else whole.part(self._first, self._first + self.rows)

    def few(self, x: torch.Tensor) -> torch.Tensor | None:
        """Products with the matrix as it is stored, if its tensor is kept in memory."""
        kept = self._store.kept(self.tensor)
        if kept is None:
            return None
        if len(x) > 1:
            return self.few_of_each([self], [len(x)], x)
        if self._multiply is None or self._multiply.whole is not kept:
            self._multiply = Multiplication(
                kept, self._first, self._first + self.rows, rounds=self._store.rounds
            )
        return self._multiply(x)

    def is_few(self, n: int) -> bool:
        """Return whether `few` takes less time than decoding for n rows, if it can multiply."""
        if not FEW_ROWS < n <= FEW_ROWS_ONCE:
            return n <= FEW_ROWS
        is_once = self.is_rounded and not self._store.stays_rounded(self.tensor)
        # Rows that are not kept are in 8 bits as before, not in float32.
        return is_once and self._store.kept(self.tensor) is not None

    def few_of_each(
        self, matrices: Sequence[object], counts: Sequence[int], x: torch.Tensor
    ) -> torch.Tensor | None:
        """Products as `few`: counts[i] rows of x with matrix i, one after the other. None also for
        matrices of several tensors.
        """
        kept, numbers = self._store.kept(self.tensor), list[int]()
        for matrix, n in zip(matrices, counts, strict=True):
            if not isinstance(matrix, Matrix) or matrix.tensor is not self.tensor:
                return None
            numbers += [matrix.index] * n
        if kept is None:
            return None
        return products_of_each(kept, self.rows, numbers, x, rounds=self._store.rounds)

    def rounded(self) -> torch.Tensor | None:
        """The matrix in 8 bits, from the cache; None if products with it are in float32."""
        if not self.is_rounded:
            return None
        n_bytes = packed_bytes(self.rows, self.cols)
        if n_bytes > self._store.cache.capacity:
            return None
        return self._store.cache.get((*self._key, "rounded"), n_bytes, self._packed)

    @property
    def is_rounded(self) -> bool:
        """Whether products with many rows are in 8 bits, if there is memory for that."""
        type = self._store.type_of(self.tensor)
        return self._store.rounds and can_be_rounded(type, self.rows, self.cols)

    def _packed(self) -> torch.Tensor:
        if (kept := self._store.kept(self.tensor)) is not None:
            return packed(kept.part(self._first, self._first + self.rows))
        tensor, stored = self._store.stored(self.tensor, self._first, self._first + self.rows)
        return packed(kept_rows(tensor.type, stored, self.cols))

    def round_rows(self, x: torch.Tensor) -> RoundedRows:
        """Return x in 8 bits, for products with the matrix in 8 bits."""
        return self._store.rounded_rows(x)

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop; whole row groups for interleaved types."""
        return self._store.decode(
            *self._store.stored(self.tensor, self._first + start, self._first + stop)
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols] on the CPU: the rows with these indices, without touching
        others, unless the matrix is kept in memory.
        """
        numbers, group = rows.cpu().numpy(), self.tensor.type.group_rows
        # Steps keep the table anyway where products are in 8 bits.
        if self._store.rounds and (kept := self.kept()) is not None:
            return gathered(kept, numbers)
        groups, inverse = np.unique(numbers // group, return_inverse=True)
        tensor, pieces = self.tensor, []
        for first in (self._first + groups * group).tolist():
            tensor, stored = self._store.stored(self.tensor, first, first + group)
            pieces.append(stored)
        return self._store.decode(tensor, np.concatenate(pieces))[
            torch.from_numpy(inverse * group + numbers % group)
        ]


class Stacked:
    """Matrices on the CPU as one, the rows of each after those of the one before."""

    device, packed = CPU, None

    def __init__(self, *matrices: Matrix):
        self.matrices = self.stacked = matrices
        self.rows, self.cols = sum(m.rows for m in matrices), matrices[0].cols

    @property
    def type(self) -> GGMLType:
        """The type that the file stores."""
        return self.matrices[0].type

    @property
    def stored_bytes(self) -> int:
        """Bytes of all matrices in the file."""
        return sum(matrix.stored_bytes for matrix in self.matrices)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Return what `Matrix.parts` returns."""
        first = 0
        for matrix in self.matrices:
            for start, part in matrix.parts():
                yield first + start, part
            first += matrix.rows

    def few(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what `Matrix.few` returns."""
        found = []
        for matrix in self.matrices:
            if (part := matrix.few(x)) is None:
                return None
            found.append(part)
        return torch.cat(found, dim=1)

    def is_few(self, n: int) -> bool:
        """Return what `Matrix.is_few` returns."""
        return self.matrices[0].is_few(n)

    def few_of_each(self, matrices: object, counts: object, x: torch.Tensor) -> None:
        """Products with one of the stacked matrices after the other can be together."""

    def rounded(self) -> None:
        """Products with one of the stacked matrices after the other can be in 8 bits."""

    def round_rows(self, x: torch.Tensor) -> RoundedRows:
        """Return what `Matrix.round_rows` returns."""
        return self.matrices[0].round_rows(x)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `Matrix.gather` returns."""
        rows = rows.cpu()
        out, first = torch.empty(len(rows), self.cols), 0
        for matrix in self.matrices:
            here = (rows >= first) & (rows < first + matrix.rows)
            out[here] = matrix.gather(rows[here] - first)
            first += matrix.rows
        return out

"""Operations on rows of one or several matrices on a GPU, which rounding to every type uses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....cuda_kernels.rounding import TILE, From
from .memory import Memory

_GRID = 4096  # CUDA blocks of a kernel over all elements


class DeviceRows:
    """Operations on as many rows of each of `n_matrices` matrices, float32[rows, n_cols]; used by
    one thread at a time. `_rows` and `_matrix_rows`: of all matrices together, and of each, set
    before they are worked on.
    """

    _rows: int
    _matrix_rows: int

    def __init__(self, n_cols: int, n_matrices: int, memory: Memory, stream: Any):
        self.n_cols, self._matrices = n_cols, n_matrices
        self._memory, self._device, self._stream = memory, memory.device, stream
        self._given: dict[str, Any] = {}

    def _give(self, tables: Any, *names: str) -> None:
        """Put these arrays of a type's tables on the GPU."""
        for name in names:
            self._given[name] = self._memory.filled(name, getattr(tables, name), self._stream)

    def _of(self, *names: str) -> list[Any]:
        """Return arrays that `_give` put there."""
        return [self._given[name] for name in names]

    def _start(self, kernel: str, count: int, per_block: int, *arguments: Any) -> None:
        threads = 128 if kernel == "refit_scale" else 256
        self._device.launch(kernel, -(-count // per_block), threads, self._stream, *arguments)

    def _over(self, kernel: str, elements: int, *arguments: Any) -> None:
        grid = min(_GRID, -(-elements // 256))
        self._device.launch(kernel, grid, 256, self._stream, *arguments)

    def _multiply(
        self, a: Any, b: From, c: Any, first: int, stop: int, skip: range, fresh: bool = False
    ) -> None:
        """Add a float32[rows, depth] times b of each matrix, rows of n numbers from an element on,
        to the columns of c from `first` to `stop` that are not in `skip`.
        """
        columns = stop - first
        if columns <= 0:
            return
        n, depth = self.n_cols, a.shape[1]
        self._start(
            "add_products",
            self._matrices * -(-self._matrix_rows // TILE) * -(-columns // TILE),
            1,
            a,
            np.int64(depth),
            From(b.array, b.elements + first),
            np.int64(n),
            From(c, first),
            np.int64(n),
            *map(np.int32, (self._matrix_rows, depth, columns)),
            *map(np.int32, (skip.start - first, skip.stop - first, fresh)),
            np.int64(n * n),
        )

    def _copy(self, source: Any, target: Any, first: int, width: int) -> None:
        self._over(
            "gather_columns",
            self._rows * width,
            source,
            target,
            np.int64(self._rows),
            *map(np.int32, (self.n_cols, first, width)),
        )

    def _blocks_of_diagonal(self, matrices: Any, size: int) -> np.ndarray:
        """Return the blocks float64[matrices * n / size, size, size] on the diagonals."""
        n, device = self.n_cols, self._device
        here = np.empty((self._matrices * n // size, size, size), dtype=np.float32)
        there = self._memory.array("blocks", here.shape, np.float32)
        sizes = np.int64(self._matrices), np.int32(n), np.int32(size)
        self._over("blocks_of_diagonal", here.size, matrices, there, *sizes)
        device.download(there, here, self._stream)
        device.wait(self._stream)
        return here.astype(np.float64)

"""Quantize rows on CUDA devices with the searches of `search/`: the same functions as on the CPU,
with the same bytes.

Importances and rows are copied to the device in pieces of bounded size.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from ...cuda_kernels.compile.numba_cuda import cuda_module, device_number
from ...formats.types import GGMLType
from ..search.steps import COLUMNS, BlockSearch, RowSearch
from .search_kernels import search_kernel, threads_and_units

# With fewer rows, "row" takes 8 threads per CUDA block: there are too few warps to hide latencies.
FEW_ROWS = 8192
PIECE_ELEMENTS = 1 << 26  # on the device at a time
LOCKS: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by number of the device


class CudaEncoder:
    """Quantize rows of `n_cols` elements to a plain `type` on one device. Calls from several
    threads take turns.
    """

    def __init__(
        self,
        type: GGMLType,
        kind: str,
        search: FunctionType | BlockSearch | RowSearch,
        n_cols: int,
        weights: np.ndarray | None,
        tables: tuple[np.ndarray, ...] = (),
        device: str = "cuda",
        stream: Any = 0,
    ):
        """kind: "plain", "single", "block", "row" or "steps", as in `encode`. weights:
        float32[n_cols], None for "plain". tables: what the search takes after its scratch. stream:
        the stream on which both are copied, so as not to wait for other streams.
        """
        self._by_row = type.header_bytes > 0
        self._threads, self._units = threads_and_units(type, kind, search)
        self.type, self.kind, self.n_cols, self.number = type, kind, n_cols, device_number(device)
        self._cuda = cuda_module()
        with LOCKS[self.number], self._cuda.gpus[self.number]:
            self._kernel = search_kernel(
                type, kind, search, self.number, tuple((t.dtype.str, t.ndim) for t in tables)
            )
            self._tables = [
                self._cuda.to_device(np.ascontiguousarray(table), stream=stream) for table in tables
            ]
            if weights is not None:
                shape = n_cols if self._by_row else (-1, type.block_size)
                self._weights = self._cuda.to_device(
                    np.ascontiguousarray(weights, dtype=np.float32).reshape(shape), stream=stream
                )
            if stream:
                stream.synchronize()

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        """Encode x float32[rows, n_cols] to out uint8[rows, row_bytes], both in host memory."""
        step = max(1, PIECE_ELEMENTS // self.n_cols)
        with LOCKS[self.number], self._cuda.gpus[self.number]:
            for start in range(0, len(x), step):
                piece = np.ascontiguousarray(x[start : start + step])
                arrays = self.arrays(len(piece))
                arrays[0].copy_to_device(piece.reshape(arrays[0].shape))
                self.launch(arrays)
                target = out[start : start + step]
                if self._by_row:
                    head = self.type.header_bytes
                    target[:, :head] = arrays[1].copy_to_host()
                    target[:, head:] = arrays[2].copy_to_host().reshape(len(piece), -1)
                else:
                    target[...] = arrays[1].copy_to_host().reshape(target.shape)

    def arrays(self, rows: int, new: Callable[..., Any] | None = None) -> list[Any]:
        """Return uninitialized arrays on the current device for that many rows: x first, then the
        results (headers and blocks for a type with row headers), then scratch.

        new(shape, dtype) makes them. The first axis of each is a multiple of `rows`, so that equal
        sections of all arrays belong to the same rows.
        """
        blocks, size = self.n_cols // self.type.block_size, self.type.block_size
        if new is None:
            new = self._allocate
        if self._by_row:
            return [
                new((rows, self.n_cols), np.float32),
                new((rows, self.type.header_bytes), np.uint8),
                new((rows, blocks, self.type.block_bytes), np.uint8),
                new((rows, self.n_cols), np.float32),
                new((rows, self.n_cols // 16 + 1, COLUMNS), np.float32),
            ]
        return [
            new((rows * blocks, size), np.float32),
            new((rows * blocks, self.type.block_bytes), np.uint8),
        ]

    def _allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._cuda.device_array(shape, dtype)

    def launch(self, arrays: list[Any], stream: Any = 0, weights: Any = None) -> None:
        """Start the search on the arrays of `arrays`, with x filled in. Does not wait.

        weights: float32[n_cols] on the device, used instead of those of the encoder.
        """
        used = (
            []
            if self.kind == "plain"
            else [self._weights if weights is None else weights.reshape(self._weights.shape)]
        )
        units, threads = self._units, self._threads
        if self.kind == "row" and len(arrays[0]) < FEW_ROWS:
            units = threads = 8
        grid = -(-len(arrays[0]) // units), threads, stream
        self._kernel[grid](arrays[0], *used, *arrays[1:], *self._tables)

    def time_resident(self, x: np.ndarray, repeat: int) -> list[float]:
        """Return the seconds of `repeat` searches over x float32[rows, n_cols], which is copied to
        the device before the clock starts.
        """
        with LOCKS[self.number], self._cuda.gpus[self.number]:
            arrays = self.arrays(len(x))
            arrays[0].copy_to_device(np.ascontiguousarray(x).reshape(arrays[0].shape))
            self.launch(arrays)  # loads the code
            marks = [self._cuda.event() for _ in range(repeat + 1)]
            marks[0].record()
            for mark in marks[1:]:
                self.launch(arrays)
                mark.record()
            marks[-1].synchronize()
            return [self._cuda.event_elapsed_time(a, b) / 1000 for a, b in zip(marks, marks[1:])]


def section(arrays: list[Any], index: int, count: int) -> list[Any]:
    """Return section `index` of `count` equal ones of every array of `CudaEncoder.arrays`: those of
    the same rows.
    """
    if count == 1:
        return arrays
    return [
        array[index * len(array) // count : (index + 1) * len(array) // count] for array in arrays
    ]

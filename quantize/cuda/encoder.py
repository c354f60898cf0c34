"""Run the searches of `search/` on CUDA devices: the same functions as on the CPU, with the same
bytes.

A search in steps (`search/steps.py`) shares a block or row among a team of threads; any other has
one thread per block, or per row of a type with a scale per row. Importances and rows are copied to
the device in pieces of bounded size. Compiled kernels are cached on disk next to this file (or in
numba's user cache).
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from ...cuda_kernels.compile.numba_cuda import compile_kernel, cuda_module, device_number, on_device
from ...formats.types import GGMLType
from ..search.lanes import LANES
from ..search.steps import COLUMNS, BlockSearch, RowSearch

THREADS = {"plain": 128, "single": 128, "block": 64, "row": 32}  # per CUDA block
# With fewer rows, "row" takes 8 threads per CUDA block: there are too few warps to hide latencies.
FEW_ROWS = 8192
# In steps: threads per CUDA block, and how many of them share a block or row; measured in
# docs/benchmarks/quantizers.md.
BLOCK_THREADS, ROW_THREADS, ROW_TEAM = 256, 128, 64
PIECE_ELEMENTS = 1 << 26  # on the device at a time
LOCKS: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by number of the device

# The first axis of arrays is the block (or row); scratch is private to a thread.
_HEAD = """\
def {name}({parameters}):
    index = cuda.grid(1)
    if index < {first}.shape[0]:
"""
_BODIES = {
    "plain": ("x, out", "        search(x[index], out[index])\n"),
    "single": (
        "x, w, out",
        """\
        lanes = cuda.local.array((6, LANES), float32)
        search(x[index], w[index % w.shape[0]], out[index], lanes{tables})
""",
    ),
    "block": (
        "x, w, out",
        """\
        own = cuda.local.array(SIZE, float32)
        groups = cuda.local.array((GROUPS, COLUMNS), float32)
        lanes = cuda.local.array((6, LANES), float32)
        search(x[index], w[index % w.shape[0]], out[index], own, groups, lanes{tables})
""",
    ),
    "row": (
        "x, w, heads, bodies, own, groups",
        """\
        lanes = cuda.local.array((6, LANES), float32)
        search(x[index], w, heads[index], bodies[index], own[index], groups[index], lanes{tables})
""",
    ),
}

# In steps: teams of TEAM threads, TEAMS of them in a CUDA block. A block's scratch fits into shared
# memory, a row's does not. Teams after the last unit only take part in synchronizing: they start at
# IDLE and so make no calls.
_STEPPED = {
    "block": (
        "x, w, out",
        """\
def {name}(x, w, out):
    team = cuda.threadIdx.x // TEAM
    unit = cuda.blockIdx.x * TEAMS + team
    member = cuda.threadIdx.x % TEAM if unit < x.shape[0] else IDLE
    unit = min(unit, x.shape[0] - 1)
    own = cuda.shared.array((TEAMS, SIZE), float32)
    groups = cuda.shared.array((TEAMS, GROUPS, COLUMNS), float32)
    lanes = cuda.local.array((6, LANES), float32)
    search(x[unit], w[unit % w.shape[0]], out[unit], own[team], groups[team], lanes, member)
""",
    ),
    "row": (
        "x, w, heads, bodies, own, groups",
        """\
def {name}(x, w, heads, bodies, own, groups):
    row = cuda.blockIdx.x * TEAMS + cuda.threadIdx.x // TEAM
    member = cuda.threadIdx.x % TEAM if row < x.shape[0] else IDLE
    row = min(row, x.shape[0] - 1)
    lanes = cuda.local.array((6, LANES), float32)
    search(x[row], w, heads[row], bodies[row], own[row], groups[row], lanes, member)
""",
    ),
}


def _teams(type: GGMLType, search: BlockSearch | RowSearch) -> tuple[int, int]:
    """Return the threads that share a block (one per group) or row, and the number of such teams in
    a CUDA block.
    """
    if type.header_bytes:
        return ROW_TEAM, ROW_THREADS // ROW_TEAM
    team = type.block_size // search.steps.group
    return team, min(BLOCK_THREADS // team, 16)  # more would not fit into shared memory


def _shared_steps(search: BlockSearch | RowSearch, team: int) -> Callable:
    """Make the device function of a search in which a team of threads shares the calls of every
    step.

    All threads of the CUDA block wait for each other, not only those of a team: warps at the same
    place share the instruction cache, and the unrolled code is larger than the cache.
    """
    from numba import cuda

    each = f"for {{i}} in range(member, {{calls}}, {team}):\n"
    source = (
        f"def {search.name}({search.parameters}, member):\n"
        + search.steps.loops(each.format(i="i", calls="{calls}"), "cuda.syncthreads()\n")
        + search.end(
            "    if member == 0:\n        ",
            "    " + each.format(i="b", calls="len(blocks)") + "        ",
        )
    )
    namespace: dict[str, Any] = {"__name__": __name__, "cuda": cuda}
    namespace |= search.steps.names | search.writers
    exec(compile(source, search.file, "exec"), namespace)
    return namespace[search.name]


@functools.cache
def _kernel(
    type: GGMLType,
    kind: str,
    search: FunctionType | BlockSearch | RowSearch,
    device: int,
    tables: tuple[tuple[str, int], ...],
) -> Any:
    """Compile the kernel of a search.

    tables: dtype and number of axes of each array that the search takes after its scratch.
    """
    from numba.core.types import Array, float32, uint8, void
    from numba.np.numpy_support import from_dtype

    rows, one, three = float32[:, ::1], float32[::1], float32[:, :, ::1]
    signatures = {
        "plain": (rows, uint8[:, ::1]),
        "single": (rows, rows, uint8[:, ::1]),
        "block": (rows, rows, uint8[:, ::1]),
        "row": (rows, one, uint8[:, ::1], uint8[:, :, ::1], rows, three),
    }
    more = "".join(f", table{n}" for n in range(len(tables)))
    shape = kind
    sizes = {
        "LANES": LANES,
        "SIZE": type.block_size,
        "GROUPS": type.block_size // 16 + 1,
        "COLUMNS": COLUMNS,
    }
    registers = None
    if isinstance(search, BlockSearch | RowSearch):
        shape = "row" if type.header_bytes else "block"
        team, teams = _teams(type, search)
        name = f"{search.name}_{team}x{teams}_cuda"
        function = _shared_steps(search, team)
        # Half of the threads that a multiprocessor can hold, with no fewer registers.
        registers = 65536 // 512
        parameters, source = _STEPPED[shape]
        sizes |= {
            "IDLE": 1 << 30,
            "TEAM": team,
            "TEAMS": teams,
            "GROUPS": type.block_size // search.steps.group + 1,
        }
    else:
        name, function = f"{search.__name__}_{kind}_cuda", search
        parameters, body = _BODIES[kind]
        source = _HEAD.format(
            name="{name}", parameters=parameters + more, first=parameters.split(",")[0]
        ) + body.format(tables=more)
    signature = void(
        *signatures[shape],
        *(Array(from_dtype(np.dtype(dtype)), axes, "C") for dtype, axes in tables),
    )
    return compile_kernel(
        source.format(name=name),
        name,
        __file__,
        signature,
        registers,
        search=on_device(function),
        **sizes,
    )


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
        # _units: blocks or rows in a CUDA block
        team, self._units = (
            _teams(type, search)
            if isinstance(search, BlockSearch | RowSearch)
            else (1, THREADS[kind])
        )
        self._threads = team * self._units
        self.type, self.kind, self.n_cols, self.number = type, kind, n_cols, device_number(device)
        self._cuda = cuda_module()
        with LOCKS[self.number], self._cuda.gpus[self.number]:
            self._kernel = _kernel(
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

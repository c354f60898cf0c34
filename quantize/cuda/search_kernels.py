"""Kernels that run the searches of `search/` on CUDA devices.

A search in steps (`search/steps.py`) shares a block or row among a team of threads; any other has
one thread per block, or per row of a type with a scale per row. Compiled kernels are cached on disk
next to this file (or in numba's user cache).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from ...cuda_kernels.compile.numba_cuda import compile_kernel, on_device
from ...formats.types import GGMLType
from ..search.lanes import LANES
from ..search.steps import COLUMNS, BlockSearch, RowSearch

THREADS = {"plain": 128, "single": 128, "block": 64, "row": 32}  # per CUDA block
# In steps: threads per CUDA block, and how many of them share a block or row; measured in
# docs/benchmarks/quantizers.md.
BLOCK_THREADS, ROW_THREADS, ROW_TEAM = 256, 128, 64

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
def search_kernel(
    type: GGMLType,
    kind: str,
    search: FunctionType | BlockSearch | RowSearch,
    device: int,
    tables: tuple[tuple[str, int], ...],
) -> Any:
    """Compile the kernel of a search for the device with this number.

    kind: "plain", "single", "block", "row" or "steps", as in `encode`. tables: dtype and number of
    axes of each array that the search takes after its scratch.
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


def threads_and_units(
    type: GGMLType, kind: str, search: FunctionType | BlockSearch | RowSearch
) -> tuple[int, int]:
    """Return the threads of a CUDA block of `search_kernel`, and the blocks or rows of the type
    that it searches.
    """
    if isinstance(search, BlockSearch | RowSearch):
        team, units = _teams(type, search)
        return team * units, units
    return THREADS[kind], THREADS[kind]

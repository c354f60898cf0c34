"""Products of few tokens with packed weights on Hopper's tensor cores, at torch level: see
`prompt/few.cu`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ShapeError
from ...formats.types import GGMLType, ggml_type
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..layouts.table import unit_header
from ..packed.matrix import PackedMatrix
from . import flash_plan
from .grouped import ARCHS, FLOATS, HALVES, LOOKED_UP, LOOKUP_BYTES, UNITS

MATRICES = 3  # below each other at most
MOST_TOKENS = 128  # with more of them, decoding first and cuBLAS take less time
MOST_COLS = 64 * 1024
_STEP = 128  # columns of a step
_MOST_TILES = 4096
_PERMUTING = 128  # threads of a block that permutes
# Steps of a block that take as long as storing and adding up the parts of tiles.
_JOINING = 4


class Plan(NamedTuple):
    """How a kernel is compiled: tokens of a tile at most, stages of the ring, warpgroups that
    multiply 64 rows of weights each, and steps of weights in registers or on their way there.
    """

    tile: int
    ring: int
    groups: int
    depth: int

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Return the macros of prompt/few.cu."""
        return (
            ("TILE", str(self.tile)),
            ("RING", str(self.ring)),
            ("GROUPS", str(self.groups)),
            ("DEPTH", str(self.depth)),
        )

    @property
    def threads(self) -> int:
        """Return the threads of a block: a warpgroup more, which loads."""
        return 128 * (self.groups + 1)

    def shared(self, looks_up: bool) -> int:
        """Return bytes: the ring, a place for results of each group, the table, the alignment."""
        tokens = self.tile * 2 * (self.ring * _STEP + self.groups * 64)
        return tokens + looks_up * LOOKUP_BYTES + 1024

    def part_bytes(self, blocks: int) -> int:
        """Return bytes of the sums of the first and the last part of every block."""
        return 2 * blocks * self.tile * self.groups * 64 * 4


PLANS = (Plan(64, 6, 3, 2), Plan(128, 4, 3, 1))


class Workspace(NamedTuple):
    """Memory for launches one after the other: float32 sums of parts of tiles, counters, which
    are zero between launches, and permuted activations.
    """

    parts: torch.Tensor
    arrived: torch.Tensor
    x: torch.Tensor

    def close(self) -> None:
        """Do nothing: the memory is free when nobody refers to it."""


def is_used(device: torch.device) -> bool:
    """Return whether a device has the instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def workspace(device: torch.device) -> Workspace:
    """Allocate what launches on a device need for rows of up to MOST_COLS columns."""
    return Workspace(
        torch.empty(_part_bytes(device), dtype=torch.uint8, device=device),
        torch.zeros(_MOST_TILES, dtype=torch.int32, device=device),
        torch.empty(MOST_TOKENS * MOST_COLS, dtype=torch.float16, device=device),
    )


def workspace_bytes(device: torch.device) -> int:
    """Return the bytes of `workspace`."""
    return _part_bytes(device) + 4 * _MOST_TILES + 2 * MOST_TOKENS * MOST_COLS


def _part_bytes(device: torch.device) -> int:
    return max(plan.part_bytes(flash_plan.multiprocessors(device)) for plan in PLANS)


def plan_for(tokens: int) -> Plan:
    """Return how the kernel for so many tokens is compiled."""
    return next((plan for plan in PLANS if tokens <= plan.tile), PLANS[-1])


def _looks_up(type: GGMLType, half: torch.dtype) -> bool:
    return type.name in LOOKED_UP and half == torch.bfloat16


@functools.cache
def spec(type: GGMLType, half: torch.dtype, plan: Plan) -> KernelSpec:
    """Return the kernel for weights of a ggml type and activations of a dtype."""
    short = "f16" if half == torch.float16 else "bf16"
    return KernelSpec(
        f"prompt_few_{type.name.lower()}_{short}_{plan.tile}",
        (unit_header(type), "prompt/few.cu"),
        (
            ("TYPE", UNITS.get(type.name, type.name)),
            ("HALF", HALVES[half]),
            ("TENSOR_CORES", "1"),
            *plan.defines,
            ("LOOKS_UP", str(int(_looks_up(type, half)))),
        ),
        ("few_product",),
        ARCHS,
    )


PERMUTE = KernelSpec("prompt_permute", ("prompt/permute.cu",), (), ("permute_rows",), ARCHS)


def specs() -> list[KernelSpec]:
    """Return the specs for the types in use most, and one with a codebook; other types are compiled
    from the same source when they are used.
    """
    types = [ggml_type(name) for name in ("IQ4_K", "Q4_K", "IQ2_XXS")]
    return [PERMUTE, *(spec(type, torch.bfloat16, plan) for type in types for plan in PLANS)]


def fits(matrices: list[PackedMatrix], device: torch.device) -> bool:
    """Return whether these matrices below each other can be multiplied here, in one launch."""
    first = matrices[0]
    return (
        is_used(device)
        and len(matrices) <= MATRICES
        and first.type.name not in FLOATS
        and first.cols % 32 == 0
        and first.cols <= MOST_COLS
        and all(
            (m.type, m.cols, m.n_matrices) == (first.type, first.cols, 1) and m.rows % 8 == 0
            for m in matrices
        )
    )


def takes(x: torch.Tensor) -> bool:
    """Return whether rows of activations are multiplied here: there are few of them, and sixteen
    bytes of a row can be read together.
    """
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return len(x) <= MOST_TOKENS and aligned


def few_product(
    matrices: list[PackedMatrix],
    x: torch.Tensor,
    out: torch.Tensor,
    space: Workspace,
    bias: torch.Tensor | None = None,
    part: slice | None = None,
) -> None:
    """Compute out half[n, all rows] = x half[n, cols] times the matrices below each other, plus
    bias half[all rows]. part: only these rows, of one matrix. ShapeError if the activations do not
    fit `space`, or if there are too many rows.
    """
    first, last, _ = (part or slice(None)).indices(matrices[0].rows)
    rows = [last - first, *(m.rows for m in matrices[1:])]
    plan, cols, n = plan_for(len(x)), matrices[0].cols, MATRICES - len(matrices)
    row_tiles = -(-sum(-(-r // 64) for r in rows) // plan.groups)
    tiles = row_tiles * -(-len(x) // plan.tile)
    if tiles > _MOST_TILES or len(x) * -(-cols // _STEP) * _STEP > space.x.numel():
        raise ShapeError(
            f"{len(x)} rows of {cols} activations times {sum(rows)} rows of weights: more than"
            f" {space.x.numel()} activations or {_MOST_TILES} tiles"
        )
    type = matrices[0].type
    quarters = len(x) * -(-cols // _STEP) * 4
    launch(
        function(PERMUTE, "permute_rows", x.device),
        -(-quarters // _PERMUTING),
        _PERMUTING,
        x,
        *(np.int32(size) for size in (len(x), cols, x.stride(0))),
        space.x,
        pdl=True,
    )
    launch(
        function(spec(type, x.dtype, plan), "few_product", x.device),
        blocks_for(tiles, -(-cols // _STEP), flash_plan.multiprocessors(x.device)),
        plan.threads,
        *(m.data for m in matrices),
        *[None] * n,
        *(np.int32(r) for r in [*rows, *[0] * n]),
        *(np.int32(r) for r in [*(m.rows for m in matrices), *[0] * n]),
        *(np.float32(s) for s in [*(m.scale for m in matrices), *[1.0] * n]),
        np.int32(first),
        np.int32(cols),
        space.x,
        np.int32(len(x)),
        bias,
        out,
        np.int32(out.stride(0)),
        space.parts,
        space.arrived,
        shared=plan.shared(_looks_up(type, x.dtype)),
        pdl=True,
    )


@functools.cache
def blocks_for(tiles: int, steps: int, multiprocessors: int) -> int:
    """Return the number of blocks among which the steps of all tiles are divided: as many as there
    are multiprocessors, or fewer, so that tiles are divided evenly or not at all.
    """

    def cost(blocks: int) -> tuple[float, int]:
        whole = tiles % blocks == 0
        return -(-tiles * steps // blocks) + (0 if whole else _JOINING), blocks

    choices = {min(multiprocessors, tiles * steps)}
    choices |= {tiles * n for n in range(1, multiprocessors // tiles + 1)}
    choices |= {tiles // n for n in range(1, tiles + 1) if tiles % n == 0}
    return min((c for c in choices if c <= multiprocessors), key=cost)

"""Plans and kernel specs of products of 3 to 8 rows of activations with quantized weights, on
tensor cores: see `matvec/several.cu`. A launch before (`matvec/round.cu`) rounds the activations
into memory that the caller lends:

    with several.lent(several.space(device)):
        norm_matvec(h, norm_weight, eps, [q, k, v], [out_q, out_k, out_v])

Without that, several rows are multiplied as one is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from ...formats.types import GGMLType, ggml_type
from ..common.gating import Gating
from ..compile.spec import KernelSpec
from ..layouts.table import packed_layout, packed_types, plain_type, unit_header
from .plan import GATE_BY, GATE_UP, MATVEC_ADD, NAMES, NORM_MATVEC

FEWEST_ROWS = 3  # of activations: two take no longer as one does
MOST_COLS = 64 * 1024
CHUNK = 2048  # columns that a block rounds
ROUNDING_WARPS = 8
_WARPS = (8, 4)
_FEWEST_SLOTS, _MOST_SLOTS = 2, 4
_STEP = 256  # columns
_TOKEN_SUMS, _LANES_APART = 20, 8  # float32 of a row of activations, and of a warp besides
_TILE_COST = 0.4  # of adding up the sums of a tile, in steps
# Sums of activations that 32 weights need besides the scale, where something is taken off each
# weight (float32), or where integers are left to them (LESS and SECOND of units/common.cuh).
_SCALED_SUMS = {"Q4_1": 1, "Q5_1": 1, "Q4_K": 1, "Q5_K": 1, "Q2_K": 2}
_LEFT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q6_0", "Q5_0_R4", "Q6_0_R4"), 1),
    **dict.fromkeys(("Q1_0_G128", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_BN", "IQ2_BN"), 1),
    **dict.fromkeys(("IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ4_KSS", "IQ5_KS"), 1),
    **dict.fromkeys(("Q3_K", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K"), 2),
}
# Rows of activations up to which values are multiplied in parts, or something is left to sums.
MOST_IN_PARTS = 4
MOST_LEFT = 4


@dataclass(frozen=True)
class SeveralPlan:
    """`steps` of 256 columns make a row. `split` of the `warps` of a block share a tile of rows.
    Each warp has `slots` steps of a tile on their way, or at work. `shared`: bytes of shared memory
    of a block.
    """

    steps: int
    split: int
    warps: int
    slots: int
    shared: int


_lent: ContextVar[torch.Tensor | None] = ContextVar("rounded activations", default=None)


def space(device: torch.device) -> torch.Tensor:
    """Allocate memory for rounded activations, for launches one after the other."""
    return torch.empty(space_bytes(), dtype=torch.uint8, device=device)


def space_bytes() -> int:
    """Return the bytes of `space`."""
    return image_bytes(MOST_COLS, 8, 2)


@contextlib.contextmanager
def lent(memory: torch.Tensor) -> Iterator[None]:
    """Let products of this thread use memory of `space` until the context ends. Launches that use
    it run one after the other, on one stream.
    """
    token = _lent.set(memory)
    try:
        yield
    finally:
        _lent.reset(token)


def lent_space() -> torch.Tensor:
    """Return the memory that is lent. LookupError if there is none."""
    if (memory := _lent.get()) is None:
        raise LookupError("no memory for rounded activations was lent")
    return memory


def takes(type: GGMLType, cols: int, n: int) -> bool:
    """Return whether products of n rows of activations with rows of `cols` weights of a type are
    made here.
    """
    fits = n >= FEWEST_ROWS and not type.is_float and cols <= MOST_COLS
    return fits and _lent.get() is not None


@functools.cache
def several_plan(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    rows: Sequence[int],
    processors: int,
    limit: int,
) -> SeveralPlan:
    """Return the plan for matrices of so many `rows` (a tuple; of GATE_UP the gate's are enough) of
    `cols` weights, and n rows of activations, on a device with `limit` bytes of shared memory for a
    block. `shared` is larger than that where n is too much.
    """
    steps, tile = -(-cols // _STEP), 8 if kind == GATE_UP else 16
    tiles = sum(-(-r // tile) for r in (rows[:1] if kind == GATE_UP else rows))
    stage = stage_bytes(type, cols)
    activations = image_bytes(cols, n, sums_of(type, n)) + 5 * 32 * _places(n)

    def shared(warps: int, slots: int) -> int:
        return activations + sum_bytes(n, warps) + warps * slots * stage

    fitting = (w for w in _WARPS if shared(w, _FEWEST_SLOTS) <= limit)
    warps = next(fitting, _WARPS[-1])
    many = range(_MOST_SLOTS, _FEWEST_SLOTS, -1)
    slots = next((k for k in many if shared(warps, k) <= limit), _FEWEST_SLOTS)

    def cost(split: int) -> float:
        turns = -(-tiles // (processors * (warps // split)))
        return turns * (-(-steps // split) + _TILE_COST)

    split = min((s for s in (16, 8, 4, 2, 1) if s <= min(steps, warps)), key=cost)
    return SeveralPlan(steps, split, warps, slots, shared(warps, slots))


def stage_bytes(type: GGMLType, cols: int) -> int:
    """Return the bytes of a step of a tile: TileRing::SLOT of matvec/tile_ring.cuh."""
    total = 0
    for _, n, per_row in packed_layout(type).planes:
        piece, row = _STEP // type.block_size * n, cols // type.block_size * n
        aligned = row % 16 == 0 and piece % 16 == 0
        total += 0 if per_row else 16 * (piece if aligned else -(-piece // 16) * 16 + 16)
    return total


def sums_of(type: GGMLType, n: int) -> int:
    """Return the sums of activations that 32 weights of a type need besides their scale."""
    return _SCALED_SUMS.get(type.name, _LEFT.get(type.name, 0) if n <= MOST_LEFT else 0)


def image_bytes(cols: int, n: int, sums: int) -> int:
    """Return the bytes of n rounded rows of activations: Columns::BYTES of matvec/columns.cuh."""
    units = 8 * -(-cols // _STEP)
    squares = 4 * -(-cols // CHUNK)
    return -(-_places(n) * (units * (32 + 4 * (1 + sums)) + squares) // 16) * 16


def sum_bytes(n: int, warps: int) -> int:
    """Return the bytes of shared memory for the sums of two tiles."""
    return 2 * 4 * warps * (_places(n) * _TOKEN_SUMS + _LANES_APART)


def _places(n: int) -> int:
    """Return the rows of activations that a kernel for n of them has places for."""
    return next(places for places in (2, 4, 8) if n <= places)


def round_spec(
    type: GGMLType, cols: int, n: int, bf16: bool = False, options: tuple[str, ...] = ()
) -> KernelSpec:
    """Return the kernel that rounds n rows of activations for weights of a type; it is the same for
    many types. bf16: they are bf16, not float32. options: JOINS, as in round.cu.
    """
    return _round_spec(cols, n, sums_of(type, n), type.name in _SCALED_SUMS, bf16, options)


@functools.cache
def _round_spec(
    cols: int, n: int, sums: int, scaled_sums: bool, bf16: bool, options: tuple[str, ...]
) -> KernelSpec:
    defines = {
        "COLS": cols,
        "X_ROWS": n,
        "STEPS": -(-cols // _STEP),
        "SUMS": sums,
        "SCALED_SUMS": int(scaled_sums),
        "WARPS": ROUNDING_WARPS,
        "BF16_X": int(bf16),
        **dict.fromkeys(options, 1),
    }
    name = f"round_rows_{cols}x{n}_{sums}{'_scaled' * scaled_sums}{'_bf16' * bf16}"
    name += "".join(f"_{option.lower()}" for option in options)
    pairs = tuple((k, str(v)) for k, v in defines.items())
    return KernelSpec(name, ("matvec/round.cu",), pairs, ("round_rows",))


@functools.cache
def several_spec(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    plan: SeveralPlan,
    matrices: int = 1,
    bf16: bool = False,
    options: tuple[str, ...] = (),
    gating: Gating = Gating(),
) -> KernelSpec:
    """Return the kernel of a product; arguments as those of `specs.product_spec`."""
    defines = {
        "TYPE": type.name,
        "COLS": cols,
        "X_ROWS": n,
        "KIND": kind,
        "KERNEL": NAMES[kind],
        "STEPS": plan.steps,
        "SUMS": sums_of(type, n),
        "SCALED_SUMS": int(type.name in _SCALED_SUMS),
        "IN_PARTS": int(n <= MOST_IN_PARTS),
        "SPLIT": plan.split,
        "WARPS": plan.warps,
        "SLOTS": plan.slots,
        "UNITS_IN_SHARED": 1,
        "MATRICES": matrices,
        "BLOCKS": 1,
        "PLANNED": plan.shared,
        "BF16_X": 0,
        "BF16_OUT": int(bf16 and kind == GATE_UP),
        **dict.fromkeys(options, 1),
    } | dict(gating.defines)
    if n > MOST_LEFT:
        defines["WHOLE_VALUES"] = 1
    name = (
        f"several_{NAMES[kind]}_{type.name.lower()}_{cols}x{n}_{plan.split}_{plan.slots}_{matrices}"
    )
    name += "_bf16" * bf16 + "".join(f"_{option.lower()}" for option in options) + gating.suffix
    return KernelSpec(
        name,
        (unit_header(type), "matvec/several.cu"),
        tuple((k, str(v)) for k, v in defines.items()),
        (NAMES[kind],),
    )


def specs() -> list[KernelSpec]:
    """Return specs of one shape for every type, and more of one: others are compiled on first
    use.
    """
    found, limit, processors = [], 99 << 10, 132
    for name in packed_types():
        type = plain_type(name)
        if type.is_float:
            continue
        kinds = [(MATVEC_ADD, 1, 4, (), Gating())]
        if name == "IQ4_K":
            kinds += [(NORM_MATVEC, 3, 4, (), Gating()), (NORM_MATVEC, 1, 8, ("PLAIN",), Gating())]
            kinds += [(GATE_UP, 1, 8, ("SCALED",), Gating("gelu")), (GATE_BY, 1, 3, (), Gating())]
        for kind, matrices, n, options, gating in kinds:
            cut = several_plan(type, 4096, n, kind, (4096,) * matrices, processors, limit)
            half = kind == GATE_UP
            found.append(several_spec(type, 4096, n, kind, cut, matrices, half, options, gating))
    for n in (4, 8):
        found.append(round_spec(ggml_type("IQ4_K"), 4096, n))
    found.append(round_spec(ggml_type("Q2_K"), 4096, 4, True))
    found.append(round_spec(ggml_type("Q8_0"), 4096, 8, False, ("JOINS",)))
    return found

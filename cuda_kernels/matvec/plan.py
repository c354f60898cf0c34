"""Plan how a matrix-vector product is divided among warps and stages, from shapes and device alone,
and return the kernel spec of each plan. See matvec/feed.cuh.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...formats.types import GGMLType
from ..common.gating import Gating
from ..compile.grids import shared_bytes
from ..compile.spec import KernelSpec
from ..layouts.table import packed_layout, packed_types, plain_type, spread_type, unit_header

NORM_MATVEC, MATVEC_ADD, GATE_UP, GATE_BY = range(4)  # KIND of matvec/matvec.cu and matvec/float.cu
# KIND of matvec/experts.cu, 4 less.
EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_GATE, EXPERT_GATE_BY = range(4, 8)
_AFTER_FEW_BLOCKS = (MATVEC_ADD, EXPERT_GATE_UP, EXPERT_GATE)
NAMES = (
    *("norm_matvec", "matvec_add", "gate_up", "gate_by"),
    *("expert_gate_up", "expert_down", "expert_gate", "expert_gate_by"),
)
MOST_ROWS = 8  # of activations
MOST_SLOTS = 32  # experts of a token
FLOAT_WARPS = 8  # of a block that multiplies with experts of floats

# Elements that a lane takes at once, G of the formats; 32 for all others.
_GRANULE = {
    "Q8_0": 16,
    "IQ2_K": 64,
}
# Types with their own file in matvec/*.cuh; the others are generic.
_OWN = {
    "IQ4_K": "iq_k",
    "IQ2_K": "iq_k",
    "IQ4_KS": "iq_ks",
    "Q4_K": "k",
    "Q6_K": "k",
    "Q8_0": "legacy",
}
_MOST_SPREAD = 68 << 10  # bytes of activations that are in four bytes each: the ring needs the rest
# Bytes of weights on their way to a multiprocessor: 23 KB hide the latency of memory, the rest the
# gap between kernels.
_RING = 80 << 10
_LARGEST_RING = 110 << 10  # for long stages, and for experts; two blocks still fit on an H200
_WARPS = 16
_WHOLE_STEPS = 3  # rows of so many steps are one stage
_DOWN_AHEAD = 2
_ACROSS = 1
_STAGE_STEPS = 2
_MORE_STAGE_STEPS = 4  # of types with few bytes for as much arithmetic
_FEW_BITS = 2.6  # per weight
_MOST_POINTERS = 6
# Types with so much arithmetic that its registers are worth more than the pointers kept in them.
_POINTERLESS = ("IQ3_KT", "IQ3_S", "IQ3_XXS", "IQ5_K", "IQ5_KS", "IQ6_K")
# Types whose steps of a stage are a loop, because the code of all steps is too long for the
# instruction cache: of experts, and of other matrices.
_ROLLED_EXPERTS = ("IQ3_KT", "IQ5_K", "IQ5_KS", "IQ6_K", "Q8_K_R8", "Q8_K_R16")
_ROLLED = ("IQ2_KT",)
RESERVED = (
    2048  # bytes of shared memory for what is not sized by the plan, and what the system takes
)


@dataclass(frozen=True)
class MatvecPlan:
    """`steps` of 32 granules make a row. A stage is `stage_steps` of them of `stage_rows` rows.
    Each of `warps` warps has `slots` stages in flight. `shared`: bytes of shared memory of a block.
    `resident`: blocks whose registers fit on a multiprocessor at once. `spread`: each activation is
    in four bytes. `joined`: lanes take the granules of all slots of an expert as one row.
    `advances`: pointers to weights are kept from stage to stage.
    """

    steps: int
    stage_steps: int
    stage_rows: int
    slots: int
    warps: int
    shared: int
    resident: int
    spread: bool = False
    joined: bool = False
    advances: bool = False


def granule(type: GGMLType) -> int:
    return _GRANULE.get(type.name, 32)


def stage_bytes(type: GGMLType, cols: int, stage_steps: int, joined: bool = False) -> int:
    """Shared memory for a stage of one row: Ring::ROW of matvec/ring.cuh."""
    total, elements = 0, cols if joined else stage_steps * 32 * granule(type)
    for _, n, per_row in packed_layout(type).planes:
        if per_row:  # ROW_FACTOR of the formats; HEADER_STAGED: the 16 bytes that have it
            total += 16 if n == 2 else 0
            continue
        piece, row = elements // type.block_size * n, cols // type.block_size * n
        aligned = row % 16 == 0 and piece % 16 == 0
        total += piece if aligned else -(-piece // 16) * 16 + 16
    return total


def activation_bytes(type: GGMLType, steps: int, spread: bool = False) -> int:
    """Return the bytes of one row of activations in 8 bits, or four times that if `spread`:
    Activations::BYTES of matvec/common.cuh.
    """
    of_one, record = granule(type), 16 if granule(type) == 32 else 8
    return 32 * steps * (of_one * (4 if spread else 1) + record)


def shared_space_of(type: GGMLType, limit: int) -> int:
    """Return how many bytes of shared memory a plan for the type can have, of the `limit` of a
    block: some types have a table there.
    """
    return limit - RESERVED - shared_bytes(type)


@functools.cache
def plan(
    type: GGMLType, cols: int, n: int, kind: int, limit: int, wanted: int | None = None
) -> MatvecPlan:
    """Return the plan for rows of `cols` weights and n rows of activations (of EXPERT_DOWN: n
    slots), on a device that has `limit` bytes of shared memory for a block; the ring uses `wanted`
    bytes where that is less. `shared` is larger than the limit where n is too much.
    """
    steps = -(-cols // (32 * granule(type)))
    spread = (
        spread_type(type)
        and (n == 1 or kind == EXPERT_DOWN)
        and n * activation_bytes(type, steps, True) <= _MOST_SPREAD
    )
    stage_rows = _stage_rows(type, n, kind)
    x, fewest = n * activation_bytes(type, steps, spread), 1 if kind == EXPERT_DOWN else 2
    ring = min(
        _LARGEST_RING if kind >= EXPERT_GATE_UP else _RING,
        shared_space_of(type, min(limit, wanted or limit)) - x,
    )

    # Lanes keep their place in a block of 256. Joined rows are one stage.
    joinable = kind == EXPERT_DOWN and granule(type) == 32 and cols % 256 == 0 and cols % 1024 != 0

    def slot(k: int) -> int:
        return stage_rows * stage_bytes(type, cols, k, joinable and k == steps)

    warps = _WARPS
    while warps > 4 and fewest * warps * slot(1) > shared_space_of(type, limit) - x:
        warps //= 2
    few = granule(type) == 32 and 8 * type.block_bytes < _FEW_BITS * type.block_size
    wanted_steps = _MORE_STAGE_STEPS if few else _STAGE_STEPS
    if steps == _WHOLE_STEPS and (n == 1 or kind >= EXPERT_GATE_UP):
        wanted_steps = steps
    most = min(_LARGEST_RING, shared_space_of(type, min(limit, wanted or limit)) - x)

    def fitting(ahead: int) -> int:
        lengths = range(min(wanted_steps, steps), 0, -1)
        return next((k for k in lengths if ahead * slot(k) <= most // warps), 0)

    # Of experts' rows two short stages rather than one long stage.
    longest = (fitting(_DOWN_AHEAD) if kind == EXPERT_DOWN else 0) or fitting(fewest) or 1
    even = next(k for k in range(longest, 0, -1) if steps % k == 0)
    # Equal stages, if they need not be much shorter.
    stage_steps = even if 3 * even >= 2 * longest else -(-steps // -(-steps // longest))
    slots = max(fewest, min(8, ring // (warps * slot(stage_steps))))
    return MatvecPlan(
        steps,
        stage_steps,
        stage_rows,
        slots,
        warps,
        x + warps * slots * slot(stage_steps),
        2 if n == 1 or kind == EXPERT_DOWN else 1,  # blocks whose registers fit
        spread,
        joinable and stage_steps == steps,
        _advances(type, stage_rows),
    )


def _stage_rows(type: GGMLType, n: int, kind: int) -> int:
    """Return how many rows of weights a warp works on at once."""
    return {GATE_UP: 2, EXPERT_GATE_UP: 2, EXPERT_DOWN: n}.get(kind, 1)


def _advances(type: GGMLType, stage_rows: int) -> bool:
    """Return whether pointers advance from stage to stage: fewer instructions where a stage has
    few pieces, and more registers.
    """
    if type.name in _POINTERLESS:
        return False
    planes = packed_layout(type).planes
    return stage_rows * sum(not per_row for _, _, per_row in planes) <= _MOST_POINTERS


@functools.cache
def quantized_spec(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    plan: MatvecPlan,
    matrices: int = 1,
    bf16: bool = False,
    options: tuple[str, ...] = (),
    gating: Gating = Gating(),
    biased: bool = False,
    scaled: bool = False,
    shared: int = 0,
) -> KernelSpec:
    """Return the kernel of a product with a quantized type; `matrices` below each other for
    NORM_MATVEC. bf16: x of MATVEC_ADD, the result of GATE_UP are bf16. options: of PLAIN, SETS and
    JOINS, as in matvec.cu. gating: how kinds with a gate join their products. biased, scaled:
    experts have biases or scales. shared: slots of a shared expert.
    """
    experts = kind >= EXPERT_GATE_UP
    defines = {
        "TYPE": type.name,
        "COLS": cols,
        "X_ROWS": n,
        "KIND": kind - EXPERT_GATE_UP if experts else kind,
        "KERNEL": NAMES[kind],
        "UNITS_IN_SHARED": 1,
        "USES": 1 if experts else n,
        "STEPS": plan.steps,
        "STAGE_STEPS": plan.stage_steps,
        "STAGE_ROWS": plan.stage_rows,
        "SLOTS": plan.slots,
        "WARPS": plan.warps,
        "MATRICES": matrices,
        "BLOCKS": plan.resident,
        "ACROSS": _ACROSS,
        "ADVANCES": int(plan.advances),
        "ROLLED": int(type.name in (_ROLLED_EXPERTS if experts else _ROLLED)),
        "SPREAD_X": int(plan.spread),
        "JOINED_SLOTS": int(plan.joined),
        "BF16_X": int(bf16 and kind == MATVEC_ADD),
        "BF16_OUT": int(bf16 and kind == GATE_UP),
        **dict.fromkeys(options, 1),
    }
    defines |= dict(gating.defines)
    terms = gating.suffix
    if experts:
        defines |= {"BIASED": int(biased), "SCALED": int(scaled), "SHARED_SLOTS": shared}
        terms += "_biased" * biased + "_scaled" * scaled + f"_shared{shared}" * (shared > 0)
    own = (f"matvec/{_OWN[type.name]}.cuh",) if type.name in _OWN else ()
    shape = f"{cols}x{n}_{plan.stage_steps}_{plan.slots}_{matrices}"
    shape += "_spread" * plan.spread + "_joined" * plan.joined
    name = f"{NAMES[kind]}_{type.name.lower()}_{shape}{'_bf16' * bf16}{_suffix(options)}{terms}"
    return KernelSpec(
        name,
        (unit_header(type), *own, "matvec/experts.cu" if experts else "matvec/matvec.cu"),
        tuple((k, str(v)) for k, v in defines.items()),
        (NAMES[kind],),
    )


def _suffix(options: tuple[str, ...]) -> str:
    return "".join(f"_{option.lower()}" for option in options)


@functools.cache
def float_spec(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    split: int,
    options: tuple[str, ...] = (),
    gating: Gating = Gating(),
) -> KernelSpec:
    """Return the kernel of a product with F32, F16 or BF16. `split` warps share a row. options: of
    PLAIN, as in matvec.cu. gating: how kinds with a gate join their products.
    """
    warps, vectors = max(split, 4), cols * type.block_bytes // 16
    defines = {
        "TYPE": type.name,
        "WEIGHT_BYTES": type.block_bytes,
        "COLS": cols,
        "X_ROWS": n,
        "KIND": kind,
        "KERNEL": NAMES[kind],
        "WARPS": warps,
        "SPLIT": split,
        "UNROLL": min(4, -(-vectors // (32 * split))),
        **dict.fromkeys(options, 1),
        **dict(gating.defines),
    }
    return KernelSpec(
        f"{NAMES[kind]}_{type.name.lower()}_{cols}x{n}_{split}{_suffix(options)}{gating.suffix}",
        ("matvec/float.cu",),
        tuple((k, str(v)) for k, v in defines.items()),
        (NAMES[kind],),
    )


def float_expert_spec(
    type: GGMLType,
    cols: int,
    n: int,
    kind: int,
    gating: Gating = Gating(),
    *,
    biased: bool = False,
    scaled: bool = False,
    shared: int = 0,
) -> KernelSpec:
    """Return the kernel of a product with experts of F32, F16 or BF16. n: slots of EXPERT_DOWN, of
    which the last `shared` ones are a shared expert's; other kinds have one row of activations, and
    with `shared` the matrices of a shared expert.
    """
    defines = {
        "TYPE": type.name,
        "WEIGHT_BYTES": type.block_bytes,
        "COLS": cols,
        "X_ROWS": n,
        "KIND": kind,
        "KERNEL": NAMES[kind],
        "WARPS": FLOAT_WARPS,
        "UNROLL": min(4, -(-cols * type.block_bytes // (16 * 32))),
        "BIASED": int(biased),
        "SCALED": int(scaled),
        "SHARED_SLOTS": shared,
        **dict(gating.defines),
    }
    terms = "b" * biased + "s" * scaled + f"+{shared}" * (shared > 0)
    return KernelSpec(
        f"{NAMES[kind]}_{type.name.lower()}_{cols}x{n}{terms}{gating.suffix}",
        ("matvec/float_experts.cu",),
        tuple((k, str(v)) for k, v in defines.items()),
        (NAMES[kind],),
    )


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of a device: multiprocessors, and the bytes of shared memory that a block can have at
    most. A multiprocessor has one block at a time if each has `alone` bytes; `beside` is what
    another block can have next to such a block.
    """

    processors: int
    shared: int
    alone: int
    beside: int

    def shared_of(self, type: GGMLType, kind: int, cut: MatvecPlan) -> int:
        """Return the bytes of shared memory to launch with, next to the table of the type.

        Each block of a product is to be on a multiprocessor before the block in front of it has
        ended there, so that its first weights load meanwhile, and all multiprocessors are to have
        one block: where some have two and others none, everything waits for those. In a chain of
        kernels with a block everywhere it comes out so by itself, as two blocks fit and not three.
        What follows attention or a router, whose blocks are here and there, has to be alone.
        """
        alone = self.alone - shared_bytes(type) if kind in _AFTER_FEW_BLOCKS else 0
        return max(cut.shared, alone)

    def plan(self, type: GGMLType, cols: int, n: int, kind: int) -> MatvecPlan:
        return plan(
            type,
            cols,
            n,
            kind,
            self.shared,
            self.alone if kind in _AFTER_FEW_BLOCKS else self.beside,
        )


@functools.cache
def limits(device: int) -> DeviceLimits:
    """Return the limits of a CUDA device, by number."""
    facts = torch.cuda.get_device_properties(device)
    half, most = facts.shared_memory_per_multiprocessor // 2, facts.shared_memory_per_block_optin
    # A block also has 1 KB of the system's: two of `alone` bytes do not fit, one of `beside` does.
    alone = min(half - 1024 + 128, most - RESERVED)
    # Kernels overlap from sm_90 on.
    beside = min(half, most - RESERVED) - RESERVED if facts.major >= 9 else most
    return DeviceLimits(facts.multi_processor_count, most, alone, beside)


def sample_specs() -> list[KernelSpec]:
    """Return specs of one row length for each kind of kernel and type, as others are compiled on
    first use: for types with their own format in the forms that the layers of a model need, and
    once for eight rows.
    """
    found, limit = [], 99 << 10
    for name in packed_types():
        type = plain_type(name)
        if type.is_float:
            found.append(float_spec(type, 2048, 1, NORM_MATVEC, 4))
            found.append(float_spec(type, 2048, 1, NORM_MATVEC, 4, options=("PLAIN",)))
            found.append(float_expert_spec(type, 2048, 1, EXPERT_GATE_UP))
            found.append(float_expert_spec(type, 768, 8, EXPERT_DOWN))
            continue
        if name == "MXFP4":  # experts as in gpt-oss
            for kind, n, gating in (
                (EXPERT_GATE_UP, 1, Gating("swiglu_oai", 7.0)),
                (EXPERT_DOWN, 4, Gating()),
            ):
                cut = plan(type, 2880, n, kind, limit)
                found.append(quantized_spec(type, 2880, n, kind, cut, gating=gating, biased=True))
        if name not in _OWN:
            found.append(
                quantized_spec(type, 4096, 1, MATVEC_ADD, plan(type, 4096, 1, MATVEC_ADD, limit))
            )
            continue
        for kind, cols, n, matrices, bf16 in (
            (NORM_MATVEC, 4096, 1, 3, False),
            (MATVEC_ADD, 4096, 1, 1, True),
            (GATE_UP, 4096, 1, 1, True),
            (GATE_BY, 4096, 1, 1, False),
            (EXPERT_GATE_UP, 2048, 1, 1, False),
            (EXPERT_DOWN, 768, 8, 1, False),
            (MATVEC_ADD, 4096, 8, 1, False),
        ):
            found.append(
                quantized_spec(
                    type, cols, n, kind, plan(type, cols, n, kind, limit), matrices, bf16
                )
            )
        cut, gelu = plan(type, 4096, 1, GATE_UP, limit), Gating("gelu")
        found.append(quantized_spec(type, 4096, 1, GATE_UP, cut, 1, True, ("JOINS",), gelu))
    return found

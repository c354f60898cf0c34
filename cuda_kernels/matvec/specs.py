"""The kernel specs of matrix-vector products."""

from __future__ import annotations

import functools

from ...formats.types import GGMLType
from ..common.gating import Gating
from ..compile.spec import KernelSpec
from ..layouts.table import packed_types, plain_type, unit_header
from .plan import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_BY,
    GATE_UP,
    MATVEC_ADD,
    NAMES,
    NORM_MATVEC,
    SINGLE_ROW,
    MatvecPlan,
    plan,
)

# Types with a format of their own, and its file in matvec/; the others are generic.
_OWN = {
    "F32": "floats",
    "F16": "floats",
    "BF16": "floats",
    "IQ4_K": "iq_k",
    "IQ2_K": "iq_k",
    "IQ4_KS": "iq_ks",
    "Q4_K": "k",
    "Q6_K": "k",
    "Q8_0": "legacy",
}
_ACROSS = 1
# Types whose steps of a stage are a loop, because the code of all steps is too long for the
# instruction cache: of experts, and of other matrices.
_ROLLED_EXPERTS = ("IQ3_KT", "IQ5_K", "IQ5_KS", "IQ6_K", "Q8_K_R8", "Q8_K_R16")
_ROLLED = ("IQ2_KT",)
# Types whose products of a layer's input and output projections let the next launch start only
# when the preceding one has ended. If it starts earlier, its first weights delay their activations
# (docs/benchmarks/cuda-history/products.md).
_LATE = ("IQ4_K", "IQ4_KS", "IQ4_KSS", "IQ4_XS", "IQ5_K", "Q4_0", "Q4_K")


@functools.cache
def product_spec(
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
    shared_scaled: bool = False,
    some_absent: bool = False,
    one_token: bool = True,
    weighed: int = 0,
) -> KernelSpec:
    """Return the kernel of a product with a type; `matrices` below each other for
    NORM_MATVEC. bf16: x of MATVEC_ADD, the result of GATE_UP are bf16. options: of PLAIN, SETS,
    JOINS, SCALED and LATE_BELOW, as in matvec.cu. gating: how kinds with a gate join their
    products. biased, scaled: experts have biases or scales. shared: slots of a shared expert;
    shared_scaled: its matrices have scales. some_absent: experts of other devices, with negative
    ids, take no time. one_token: experts of one token; for other kinds n is the number of tokens.
    weighed: what experts read is multiplied by weights, so many for each token.
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
        "NEGATED_X": int(plan.negated),
        "JOINED_SLOTS": int(plan.joined),
        "BF16_X": int(bf16 and kind == MATVEC_ADD),
        "BF16_OUT": int(bf16 and kind == GATE_UP),
        "LATE": int(is_late(type, n, kind, bf16, options)),
        "PACED": int(_is_paced(one_token if experts else n == 1, kind, bf16)),
        **dict.fromkeys(options, 1),
    }
    defines |= dict(gating.defines)
    terms = gating.suffix
    if experts:
        defines |= {"BIASED": int(biased), "SCALED": int(scaled), "SHARED_SLOTS": shared}
        defines |= {"SHARED_SCALED": int(shared_scaled), "SOME_ABSENT": int(some_absent)}
        defines |= {"READ_AGAIN": int(not one_token), "WEIGHED": weighed}
        terms += "_biased" * biased + "_scaled" * scaled + f"_shared{shared}" * (shared > 0)
        terms += "_shared_scaled" * shared_scaled + "_absent" * some_absent
        terms += "_tokens" * (not one_token) + f"_weighed{weighed}" * (weighed > 0)
    own = (f"matvec/{_OWN[type.name]}.cuh",) if type.name in _OWN else ()
    shape = f"{cols}x{n}_{plan.stage_steps}_{plan.slots}_{matrices}"
    shape += "_spread" * plan.spread + "_joined" * plan.joined
    shape += f"_{plan.stage_rows}slots" * (kind == EXPERT_DOWN and plan.stage_rows < n)
    shape += "_pairs" * (plan.stage_rows == 2 and kind in SINGLE_ROW)
    name = f"{NAMES[kind]}_{type.name.lower()}_{shape}{'_bf16' * bf16}{_suffix(options)}{terms}"
    return KernelSpec(
        name,
        (unit_header(type), *own, "matvec/experts.cu" if experts else "matvec/matvec.cu"),
        tuple((k, str(v)) for k, v in defines.items()),
        (NAMES[kind],),
    )


def is_late(type: GGMLType, n: int, kind: int, bf16: bool, options: tuple[str, ...]) -> bool:
    """Return whether the next launch may start only when the preceding one has ended: not where
    that was slower (bf16: x of MATVEC_ADD is the result of GATE_UP) or was not measured (several
    rows, options).
    """
    is_measured = n == 1 and kind in (NORM_MATVEC, MATVEC_ADD) and not bf16
    return is_measured and not set(options) - {"LATE_BELOW"} and type.name in _LATE


def _is_paced(one_token: bool, kind: int, bf16: bool) -> bool:
    """Return whether a launch fills its rings stage by stage, so that its copies do not hold up the
    activations of the launch before. Not where that was slower (output projections, gate and up) or
    not faster (several tokens). bf16: x of MATVEC_ADD is the result of GATE_UP, so this is down;
    down with x in float32 (of floats, or after gate and up of two types) was not measured.
    """
    return one_token and (kind in (NORM_MATVEC, EXPERT_DOWN) or (kind == MATVEC_ADD and bf16))


def _suffix(options: tuple[str, ...]) -> str:
    return "".join(f"_{option.lower()}" for option in options)


def specs() -> list[KernelSpec]:
    """Return specs of one row length for each kind of kernel and type, as others are compiled on
    first use: for types with their own format in the forms that the layers of a model need, and
    once for several rows.
    """
    found, limit = [], 99 << 10
    for name in packed_types():
        type = plain_type(name)
        if name == "MXFP4":  # experts as in gpt-oss
            for kind, n, gating in (
                (EXPERT_GATE_UP, 1, Gating("swiglu_oai", 7.0)),
                (EXPERT_DOWN, 4, Gating()),
            ):
                cut = plan(type, 2880, n, kind, limit)
                found.append(product_spec(type, 2880, n, kind, cut, gating=gating, biased=True))
        if name == "Q4_K":  # experts as in Llama 4, next to a shared one
            cut = plan(type, 5120, 1, EXPERT_GATE_UP, limit)
            found.append(product_spec(type, 5120, 1, EXPERT_GATE_UP, cut, shared=1, weighed=2))
        if name == "NVFP4":  # with the scales of its checkpoints
            for kind, matrices in ((NORM_MATVEC, 3), (MATVEC_ADD, 1), (GATE_UP, 1)):
                cut = plan(type, 4096, 1, kind, limit)
                found.append(product_spec(type, 4096, 1, kind, cut, matrices, options=("SCALED",)))
        if name not in _OWN:
            found.append(
                product_spec(type, 4096, 1, MATVEC_ADD, plan(type, 4096, 1, MATVEC_ADD, limit))
            )
            continue
        for kind, cols, n, matrices, bf16 in (
            (NORM_MATVEC, 4096, 1, 3, False),
            (MATVEC_ADD, 4096, 1, 1, True),
            (GATE_UP, 4096, 1, 1, True),
            (GATE_BY, 4096, 1, 1, False),
            (EXPERT_GATE_UP, 2048, 1, 1, False),
            (EXPERT_DOWN, 768, 8, 1, False),
            (MATVEC_ADD, 4096, 4 if type.is_float else 8, 1, False),  # as many as 99 KB hold
        ):
            found.append(
                product_spec(
                    type,
                    cols,
                    n,
                    kind,
                    plan(type, cols, n, kind, limit),
                    matrices,
                    bf16 and not type.is_float,
                )
            )
        divided = plan(type, 1536, 8, EXPERT_DOWN, limit, block_rows=32)
        found.append(product_spec(type, 1536, 8, EXPERT_DOWN, divided))
        if name == "IQ4_K":
            cut = plan(type, 2048, 1, NORM_MATVEC, limit)
            found.append(product_spec(type, 2048, 1, NORM_MATVEC, cut, 3, options=("LATE_BELOW",)))
        cut, gelu = plan(type, 4096, 1, GATE_UP, limit), Gating("gelu")
        found.append(product_spec(type, 4096, 1, GATE_UP, cut, 1, True, ("JOINS",), gelu))
    return found

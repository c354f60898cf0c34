"""Grouped products with packed weights on Hopper's tensor cores, at torch level: see
`prompt/grouped.cu`.

Rows of x are filled up with zeros to whole groups of 128 columns. x comes with the columns of each
group permuted, as `prompt.add_norm(..., permuted=True)` and `grouped_gate_up` write it: at place p
of a group, with s = p % 16, is column s % 8 // 2 * 32 + p // 16 * 4 + s % 2 + s // 8 * 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...formats.types import GGMLType, ggml_type
from ..common.gating import NO_TERMS, ExpertTerms, Gating
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..layouts.table import packed_types, unit_header
from ..packed.matrix import PackedMatrix
from .overlap import overlap

_USED = 8  # experts of a token, about: for `overlap`
HALVES = {torch.bfloat16: "0", torch.float16: "1"}
_LARGEST_TABLE = 1024
# In bfloat16, pairs of values of these types are looked up in a table in shared memory.
LOOKED_UP = (
    *("IQ2_K", "IQ3_K", "IQ4_K", "IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ4_KSS", "IQ4_NL", "IQ4_XS"),
)
# Others whose values take few enough registers for three warpgroups that multiply instead of two.
_THREE_GROUPS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_0_R4", "Q5_1", "Q6_0", "Q6_0_R4", "MXFP4", "NVFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "Q1_0_G128", "Q2_0", "TQ1_0", "TQ2_0"),
    *("IQ1_BN", "IQ2_BN", "IQ5_K", "IQ6_K", "IQ5_KS", "IQ2_KL", "IQ1_KT", "IQ2_KT", "IQ3_KT"),
    *("IQ4_KT", "Q8_KV", "Q8_K_R8", "Q8_K_R16"),
)
# Units that differ from others only in the sign of zeros.
UNITS = {"Q5_0_R4": "Q5_0", "Q6_0_R4": "Q6_0"}
LOOKUP_BYTES = 256 * 128
FLOATS = ("F32", "F16", "BF16")  # whose values take too many registers for small tiles
_FEW = 48  # tokens of an expert on average up to which small tiles can be faster
GROUP = 128  # columns that are permuted among themselves
ARCHS = ("sm_90a",)


def padded(cols: int) -> int:
    """Return the length of rows of activations for matrices of this many columns."""
    return -(-cols // GROUP) * GROUP


class Plan(NamedTuple):
    """How a kernel is compiled and launched: tokens of a tile at most, stages of the ring,
    warpgroups that multiply, and whether pairs are looked up.
    """

    tile: int
    ring: int
    groups: int
    looks_up: bool

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Return the macros of prompt/grouped.cu."""
        return (
            ("TILE", str(self.tile)),
            ("RING", str(self.ring)),
            ("GROUPS", str(self.groups)),
            ("LOOKS_UP", str(int(self.looks_up))),
        )

    @property
    def threads(self) -> int:
        """Return the threads of a block: a warpgroup more, which loads."""
        return 128 * (self.groups + 1)

    @property
    def shared(self) -> int:
        """Return bytes: the ring, a place for results of each group, the table, the alignment."""
        tokens = self.tile * 2 * (self.ring * GROUP + self.groups * 64)
        return tokens + self.looks_up * LOOKUP_BYTES + 1024


def plan_of(type: GGMLType, half: torch.dtype, small: bool = False) -> Plan:
    """Return how the kernels of a type are compiled and launched. small: tiles of few tokens, which
    leave registers for another warpgroup that reads the same ones.
    """
    looks_up = type.name in LOOKED_UP and half == torch.bfloat16
    if small:
        return Plan(64, 6, 4, looks_up)
    if looks_up:
        return Plan(160, 3, 3, True)
    if type.name in _THREE_GROUPS and half == torch.bfloat16:
        return Plan(160, 4, 3, False)
    return Plan(160, 4, 2, False)


def may_be_small(type: GGMLType, rows: int, n_experts: int) -> bool:
    """Return whether small tiles can be faster for so many rows of so many experts: decoding
    weights takes the time, not the products.
    """
    return rows <= _FEW * n_experts and type.name not in FLOATS


@functools.cache
def places(cols: int, device: torch.device) -> torch.Tensor:
    """Return int64[cols], where the columns of rows of activations are stored."""
    column = torch.arange(cols, device=device)
    unit, rest = column % GROUP // 32, column % 32
    place = 16 * (rest // 4) + 2 * unit + rest % 2 + 8 * (rest % 4 // 2)
    return column // GROUP * GROUP + place


@functools.cache
def spec(
    type: GGMLType, half: torch.dtype, gating: Gating = Gating(), small: bool = False
) -> KernelSpec:
    """Return the kernels for weights of a ggml type and activations of a dtype."""
    short = "f16" if half == torch.float16 else "bf16"
    plan = plan_of(type, half, small)
    return KernelSpec(
        f"prompt_grouped_{type.name.lower()}_{short}_{plan.tile}{gating.suffix}",
        (unit_header(type), "prompt/grouped.cu"),
        (
            ("TYPE", UNITS.get(type.name, type.name)),
            ("HALF", HALVES[half]),
            ("TENSOR_CORES", "1"),
            *plan.defines,
            *gating.defines,
        ),
        ("grouped_product", "grouped_gate_up"),
        ARCHS,
    )


def specs() -> list[KernelSpec]:
    """Return the specs for every type that can be packed, and both kinds of activations; of those
    with small tiles the types in use most, and one with a codebook.
    """
    return [
        *(spec(ggml_type(name), half) for name in packed_types() for half in HALVES),
        *(
            spec(ggml_type(name), torch.bfloat16, small=True)
            for name in ("IQ4_K", "Q4_K", "IQ2_XXS")
        ),
        *(spec(ggml_type("MXFP4"), half, Gating("swiglu_oai", 7.0)) for half in HALVES),
    ]


def fits(matrices: list[PackedMatrix], device: torch.device) -> bool:
    """Return whether these matrices, which see the same rows, can be multiplied here: one type and
    shape, few experts.
    """
    first = matrices[0]
    alike = all(
        (m.type, m.rows, m.cols, m.n_matrices)
        == (first.type, first.rows, first.cols, first.n_matrices)
        for m in matrices
    )
    return (
        torch.cuda.get_device_capability(device) == (9, 0)
        and alike
        and first.cols % 32 == 0
        and first.rows % 8 == 0
        and first.n_matrices <= _LARGEST_TABLE
    )


def gate_up_fits(matrices: list[PackedMatrix], device: torch.device) -> bool:
    """Return whether `grouped_gate_up` takes them: gate and up, or both in one."""
    return fits(matrices, device) and matrices[0].rows * len(matrices) % 64 == 0


def grouped_product(
    m: PackedMatrix,
    ends: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    sources: torch.Tensor | None = None,
    n_slots: int = 1,
    terms: ExpertTerms = NO_TERMS,
    n_experts: int = 0,
) -> None:
    """Compute out half[rows, m.rows]: row r is x[r] (or x[sources[r] // n_slots]) times the matrix
    of its expert, with its `terms`; see `prompt.group_rows`.

    x: half[tokens, padded(m.cols)], permuted. Rows after the last expert's stay as they are.
    n_experts: those that all rows are of, if others have some of them; 0 for these alone.
    """
    either = may_be_small(m.type, len(out), n_experts or m.n_matrices)
    for small in (False, True)[: 1 + either]:
        plan = plan_of(m.type, x.dtype, small)
        launch(
            function(spec(m.type, x.dtype, small=small), "grouped_product", x.device),
            _multiprocessors(x.device),
            plan.threads,
            m.data,
            np.int32(m.n_matrices),
            np.int32(m.rows),
            np.int32(m.cols),
            ends,
            x,
            sources,
            np.int32(n_slots),
            terms.bias,
            terms.scale,
            out,
            np.int32(either),
            shared=plan.shared,
            pdl=overlap(len(out) // _USED),
        )


def grouped_gate_up(
    matrices: list[PackedMatrix],
    ends: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    sources: torch.Tensor | None = None,
    n_slots: int = 1,
    gating: Gating = Gating(),
    terms: Sequence[ExpertTerms] = (NO_TERMS, NO_TERMS),
    n_experts: int = 0,
) -> None:
    """Compute out half[rows, padded(hidden)], permuted: silu(gate) * up, or as `gating` says, of
    the rows as in `grouped_product`. matrices, terms: gate and up, or both in one. n_experts: as
    there.
    """
    gate, up = matrices[0], matrices[1] if len(matrices) == 2 else None
    hidden = gate.rows if up is not None else gate.rows // 2
    either = may_be_small(gate.type, len(out), n_experts or gate.n_matrices)
    for small in (False, True)[: 1 + either]:
        plan = plan_of(gate.type, x.dtype, small)
        launch(
            function(spec(gate.type, x.dtype, gating, small), "grouped_gate_up", x.device),
            _multiprocessors(x.device),
            plan.threads,
            gate.data,
            None if up is None else up.data,
            np.int32(gate.n_matrices),
            np.int32(gate.rows),
            np.int32(hidden),
            np.int32(gate.cols),
            ends,
            x,
            sources,
            np.int32(n_slots),
            terms[0].bias,
            None if up is None else terms[1].bias,
            terms[0].scale,
            None if up is None else terms[1].scale,
            out,
            np.int32(either),
            shared=plan.shared,
            pdl=overlap(len(out) // _USED),
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

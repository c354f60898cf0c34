"""Copies to shared memory with a policy for L2: their addresses have no uniform part, as NVRTC 13.0
miscompiles that (cuda_kernels/sources/units/policy.cuh).
"""

from dataclasses import replace

import pytest
from iqforge.cuda_kernels.attention.shape import AttentionShape
from iqforge.cuda_kernels.compile.nvrtc import compile_spec
from iqforge.cuda_kernels.compile.spec import KernelSpec
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec.specs import product_spec, specs
from iqforge.formats.types import ggml_type

from .cubin import opcodes

HERE = mp.DeviceLimits(132, 232448, 115840, 114688)  # an H200
SHARED = 225 << 10  # of attention there
# LDGSTS with a vector register as its shared address, and with a uniform one added to it.
COPY, COPY_BY_UNIFORM = 0xFAE, 0xDAE
# Kernels that NVRTC 13.0 compiled wrongly before addresses were kept apart, and one with two rows
# in a stage, of which NVRTC 13.5, too, made such copies then.
KNOWN = {
    *(("IQ2_KL", mp.GATE_UP), ("IQ3_KS", mp.MATVEC_ADD), ("IQ1_BN", mp.GATE_UP)),
    ("Q4_0", mp.MATVEC_ADD),
}
KINDS = {
    mp.NORM_MATVEC: (4096, 1, [6144]),
    mp.MATVEC_ADD: (14336, 1, [4096]),
    mp.GATE_UP: (4096, 1, [14336]),
    mp.EXPERT_GATE_UP: (2048, 1, [768]),
    mp.EXPERT_DOWN: (768, 8, [2048]),
}


def check(spec: KernelSpec) -> None:
    pytest.importorskip("cuda.core")
    found = list(opcodes(bytes(compile_spec(spec, "sm_90").code)))
    assert COPY in found
    assert COPY_BY_UNIFORM not in found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in KNOWN else pytest.mark.full)
        for name in packed_types()
        for kind in KINDS
    ],
)
def test_products(name, kind):
    type, (cols, n, rows) = ggml_type(name), KINDS[kind]
    between = kind in (mp.MATVEC_ADD, mp.GATE_UP) and not type.is_float
    cut = HERE.plan(type, cols, n, kind, rows)
    check(product_spec(type, cols, n, kind, cut, len(rows), between))


@pytest.mark.full
def test_other_forms_of_products():
    """With options, of several tokens, of experts with biases: those that are compiled ahead."""
    for spec in specs():
        check(spec)


@pytest.mark.parametrize(
    ("cache", "length", "group"),
    [
        ("F16", 256, 8),
        ("F16", 128, 8),
        *(
            pytest.param(cache, length, group, marks=pytest.mark.full)
            for cache in ("BF16", "Q8_0", "Q5_1", "IQ4_NL")
            for length in (64, 128, 256)
            for group in (4, 8, 16)
        ),
    ],
)
def test_attention(cache, length, group):
    shape = AttentionShape(1, group, 2, length, length, cache, cache, 64, True, True)
    shape = replace(shape, deep=True).fitting(SHARED)
    if not shape.is_by_warp:
        pytest.skip("its warps share tiles, without a policy")
    check(shape.spec(SHARED))

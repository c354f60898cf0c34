"""Every type has a fast product for a decoding step: what its kernel is compiled to, and how fast a
token of a whole model was when it was last measured.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from iqforge.cuda_kernels.compile.nvrtc import compile_spec
from iqforge.cuda_kernels.layouts.table import packed_layout, packed_types, plain_type
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec.specs import product_spec
from iqforge.cuda_kernels.step.router import router_spec
from iqforge.formats.types import TYPES, ggml_type

from .cubin import functions

QUANTIZED = [name for name in packed_types() if ggml_type(name).is_quantized]
SHARED = 227 << 10
PAGE = Path(__file__).parents[1] / "docs/benchmarks/cuda.md"
# Tokens/s of llama-8b on one H200 that a type must reach. Every other one: 40 % of what its bytes
# take at 4.3 TB/s, 25 % below 2.5 bits per weight.
MUST = {
    **dict.fromkeys(("IQ3_K", "IQ2_KL", "IQ1_KT", "Q3_K"), 500),
    **dict.fromkeys(("IQ5_KS", "IQ5_K"), 450),
    **dict.fromkeys(("IQ2_KT", "IQ4_KT", "IQ4_KSS", "IQ3_KS"), 520),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), 560),
    "IQ6_K": 400,
    "IQ2_KS": 600,
    "IQ3_KT": 480,
    "Q6_K": 460,
}
EXPERTS_MUST = 602  # of qwen3-30b-a3b: 80 % of Q4_K's
# What is still too slow, and how fast it is. 602 would be 86 % of what the bytes of F16 take.
TOO_SLOW: dict[str, int] = {}
EXPERTS_TOO_SLOW = {"F16": 497, "BF16": 500}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if len(packed_layout(ggml_type(name)).planes) > 4 else pytest.mark.slow
        )
        for name in QUANTIZED
    ],
)
def test_nothing_is_called(name):
    """What differs from plane to plane is a constant. A type of five planes once called a function
    for each copy, and was five times as slow.
    """
    pytest.importorskip("cuda.core")
    type = ggml_type(name)
    cut = mp.plan(type, 4096, 1, mp.MATVEC_ADD, SHARED)
    code = bytes(compile_spec(product_spec(type, 4096, 1, mp.MATVEC_ADD, cut), "sm_90").code)
    # The compiler's own slow path of a division is one.
    assert [f for f in functions(code) if not f.startswith("$__internal")] == ["matvec_add"]


@pytest.mark.parametrize("kind", [mp.MATVEC_ADD, mp.EXPERT_GATE_UP, mp.EXPERT_DOWN, None])
def test_kernels_compile_with_stamps(kind):
    """As benchmarks/step_times.py compiles them. None: a router."""
    pytest.importorskip("cuda.core")
    if kind is None:
        spec = router_spec(1, 512, 8, 2)
    else:
        type, n = ggml_type("IQ4_NL"), 4 if kind == mp.EXPERT_DOWN else 1
        cut = mp.plan(type, 1024, n, kind, SHARED)
        spec = product_spec(type, 1024, n, kind, cut, bf16=kind == mp.MATVEC_ADD)
    spec = replace(spec, defines=(*spec.defines, ("STAMPS", "0x7f0000000000ull")))
    assert spec.functions[0] in functions(bytes(compile_spec(spec, "sm_90").code))


def test_interleaved_types_have_the_kernels_of_their_plain_type():
    """So they are as fast."""
    for type in TYPES.values():
        if type.is_interleaved and type.name not in packed_types():
            assert plain_type(type).name in packed_types()


def is_late(name: str, n: int, kind: int, **words) -> bool:
    """Return whether a product lets the next launch start only when the preceding one has ended."""
    type = ggml_type(name)
    cut = mp.plan(type, 4096, n, kind, SHARED)
    return ("LATE", "1") in product_spec(type, 4096, n, kind, cut, **words).defines


def test_the_next_launch_may_start_late_only_where_that_was_faster():
    """Of single tokens, and of some types."""
    assert is_late("IQ4_K", 1, mp.NORM_MATVEC) and is_late("IQ4_K", 1, mp.MATVEC_ADD)
    assert not is_late("IQ4_K", 1, mp.MATVEC_ADD, bf16=True)  # down, after gate and up
    assert not is_late("IQ4_K", 1, mp.GATE_UP) and not is_late("IQ4_K", 2, mp.MATVEC_ADD)
    assert not is_late("IQ4_K", 1, mp.NORM_MATVEC, options=("JOINS",))
    assert not is_late("Q8_0", 1, mp.NORM_MATVEC)


def measured() -> dict[str, tuple[float, float, float | None]]:
    """Type: tokens/s of llama-8b, the limit, and tokens/s of qwen3-30b-a3b."""
    section = PAGE.read_text().split("## Every type")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| (\w+) \| [^|]+ \| [^|]+ \| (\d+)[^|]* \| \d+ % of ([\d,]+) \| (-|\d+)",
        section,
        re.MULTILINE,
    )
    return {
        name: (float(speed), float(limit.replace(",", "")), None if e == "-" else float(e))
        for name, speed, limit, e in rows
    }


def test_types_that_are_too_slow_are_named():
    """A new type needs a line in the table. It is not to be added to the lists here."""
    found = measured()
    assert found.keys() == set(packed_types()) - {"F32"}
    slow = {}
    for name, (speed, limit, _) in found.items():
        type = ggml_type(name)
        share = 0.25 if 8 * type.block_bytes < 2.5 * type.block_size else 0.4
        if speed < MUST.get(name, share * limit):
            slow[name] = speed
    assert slow == TOO_SLOW
    experts = {name: e for name, (*_, e) in found.items() if e is not None and e < EXPERTS_MUST}
    assert experts == EXPERTS_TOO_SLOW

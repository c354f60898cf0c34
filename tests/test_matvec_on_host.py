"""The matrix-vector kernels run block by block on the CPU, compiled by g++: their plans, rings,
masks and sums.
"""

import ctypes
import shutil
from functools import partial

import pytest
import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec.specs import product_spec
from iqforge.formats.types import ggml_type

from .matvec_host import DENSE, LIMIT, host_kernel, plan, start
from .matvec_reference import EPS, assert_close, draw, matrix, normed, rounded, silu, weights

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return partial(host_kernel, tmp_path_factory.mktemp("matvec"))


CASES = [
    ("IQ4_K", 1, 1280, {}),
    ("IQ4_K", 3, 1280, {"stage_steps": 1, "slots": 3}),
    ("IQ4_KS", 1, 2304, {"stage_steps": 2}),
    ("IQ2_K", 1, 2304, {}),
    ("Q4_K", 1, 768, {}),
    ("Q6_K", 2, 1280, {}),
    ("Q8_0", 1, 1120, {"stage_steps": 2}),
    ("IQ2_KS", 1, 1280, {}),
    ("IQ1_BN", 1, 832, {}),
    ("IQ3_XXS", 1, 768, {}),
    ("BF16", 1, 1120, {}),
    ("F16", 3, 608, {"slots": 3}),
    ("F32", 1, 352, {}),
]


@pytest.mark.parametrize(("name", "n", "cols", "changes"), CASES)
def test_norm_matvec(build, name, n, cols, changes):
    """The rows of three matrices do not fill the blocks, and a row ends within a step, a stage, and
    16 bytes.
    """
    type = ggml_type(name)
    cut = plan(type, cols, n, mp.NORM_MATVEC, **changes)
    ms = [matrix(name, rows, cols, seed=i) for i, rows in enumerate((13, 2, 5))]
    h, w, outs = (
        draw(n, cols),
        draw(cols, seed=2),
        [torch.full((n, m.rows), float("nan")) for m in ms],
    )
    arguments = [
        a for m, out in zip(ms, outs, strict=True) for a in (m.data, out, m.rows, 0, m.rows)
    ]
    start(
        build(product_spec(type, cols, n, mp.NORM_MATVEC, cut, 3), DENSE),
        cut,
        1,
        ms,
        h,
        w,
        EPS,
        *arguments,
    )
    for m, out in zip(ms, outs, strict=True):
        assert_close(out, normed(h, w, type) @ weights(m)[0].T)


def test_ranges_of_rows_without_a_norm(build):
    type, cols = ggml_type("Q8_0"), 1120
    cut, m, x = plan(type, cols, 2, mp.NORM_MATVEC), matrix("Q8_0", 20, cols), draw(2, cols)
    outs = [torch.full((2, rows), float("nan")) for rows in (13, 7)]
    spec = product_spec(type, cols, 2, mp.NORM_MATVEC, cut, 3, options=("PLAIN",))
    parts = [m.data, outs[0], 13, 0, 20, m.data, outs[1], 7, 13, 20, None, None, 0, 0, 0]
    start(build(spec, DENSE), cut, 1, [m], x, None, EPS, *parts)
    assert_close(torch.cat(outs, 1), rounded(x) @ weights(m)[0].T)


@pytest.mark.parametrize(
    ("name", "cols", "changes", "biased"),
    [
        ("IQ4_K", 2816, {}, False),
        ("Q8_0", 2048, {"stage_steps": 3}, True),
        ("IQ4_KS", 3584, {"slots": 3}, False),
        ("IQ2_KT", 2816, {}, False),
        ("IQ3_S", 768, {}, True),
        ("IQ6_K", 768, {}, False),
        ("IQ2_KL", 768, {}, False),
        ("IQ3_KT", 2816, {}, False),
        ("IQ4_KT", 2816, {"stage_rows": 2}, False),
        ("Q2_K", 2816, {"stage_rows": 2}, True),
        ("BF16", 2848, {}, True),
        ("F32", 800, {}, False),
    ],
)
def test_matvec_add(build, name, cols, changes, biased):
    type, n = ggml_type(name), 1
    cut, m = plan(type, cols, n, mp.MATVEC_ADD, **changes), matrix(name, 20, cols)
    x, h, bias = draw(n, cols), draw(n, 20, seed=2), draw(20, seed=3) if biased else None
    expected = h.double() + rounded(x, type) @ weights(m)[0].T
    if bias is not None:
        expected += bias
    start(
        build(product_spec(type, cols, n, mp.MATVEC_ADD, cut), DENSE),
        cut,
        1,
        [m],
        x,
        bias,
        0.0,
        m.data,
        h,
        20,
        0,
        20,
        *[None, None, 0, 0, 0] * 2,
    )
    assert_close(h, expected)


def test_bf16_in_between(build):
    """Between gate_up and down, activations are rounded once more."""
    type, cols, rows = ggml_type("IQ4_KS"), 2816, 20
    cut, m, x, h = (
        plan(type, cols, 1, mp.MATVEC_ADD),
        matrix("IQ4_KS", rows, cols),
        draw(1, cols).bfloat16(),
        draw(1, rows, seed=2),
    )
    expected = h.double() + rounded(x) @ weights(m)[0].T
    start(
        build(product_spec(type, cols, 1, mp.MATVEC_ADD, cut, bf16=True), DENSE),
        cut,
        1,
        [m],
        x,
        None,
        0.0,
        m.data,
        h,
        rows,
        0,
        rows,
        *[None, None, 0, 0, 0] * 2,
    )
    assert_close(h, expected)
    cut, h, w, out = (
        plan(type, cols, 1, mp.GATE_UP),
        draw(1, cols),
        draw(cols, seed=2),
        torch.zeros(1, rows // 2, dtype=torch.bfloat16),
    )
    start(
        build(product_spec(type, cols, 1, mp.GATE_UP, cut, bf16=True), DENSE),
        cut,
        1,
        [m],
        h,
        w,
        EPS,
        m.data,
        out,
        rows // 2,
        0,
        rows,
        m.data,
        out,
        rows // 2,
        rows // 2,
        rows,
        None,
        None,
        0,
        0,
        0,
    )
    g, u = (normed(h, w) @ weights(m)[0].T).chunk(2, 1)
    assert torch.allclose(out.double(), silu(g) * u, rtol=2**-8, atol=0)


@pytest.mark.parametrize("merged", [False, True])
def test_gate_up(build, merged):
    type, cols, ff = ggml_type("IQ4_K"), 1280, 11
    cut = plan(type, cols, 1, mp.GATE_UP)
    gate = matrix("IQ4_K", 2 * ff if merged else ff, cols)
    up = gate if merged else matrix("IQ4_K", ff, cols, seed=1)
    h, w, out = draw(1, cols), draw(cols, seed=2), torch.full((1, ff), float("nan"))
    start(
        build(product_spec(type, cols, 1, mp.GATE_UP, cut), DENSE),
        cut,
        1,
        [gate, up],
        h,
        w,
        EPS,
        gate.data,
        out,
        ff,
        0,
        gate.rows,
        up.data,
        out,
        ff,
        ff if merged else 0,
        up.rows,
        None,
        None,
        0,
        0,
        0,
    )
    x = normed(h, w)
    assert_close(out, silu(x @ weights(gate)[0][:ff].T) * (x @ weights(up)[0][-ff:].T))


JOINED = f"{DENSE}, const float* delta, const float* post, float post_eps, float scale, float* to"


@pytest.mark.parametrize(
    ("name", "n", "cols"),
    [
        ("IQ4_K", 1, 768),
        ("BF16", 1, 800),
        ("F32", 3, 352),
        pytest.param("IQ4_K", 1, 1280, marks=pytest.mark.full),
        ("IQ4_K", 3, 1280),
    ],
)
def test_gelu_of_a_joined_stream(build, name, n, cols):
    """The stream is what the branch before and its norm make of it, whether a thread keeps its
    elements in registers or not, and is written once by all blocks together.
    """
    type, ff, scale = ggml_type(name), 11, 0.75
    cut = plan(type, cols, n, mp.GATE_UP)
    gate, up = matrix(name, ff, cols), matrix(name, ff, cols, seed=1)
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, ff), float("nan"))
    delta, post, to = draw(n, cols, seed=3), draw(cols, seed=4), torch.full((n, cols), float("nan"))
    joins, gelu = ("JOINS",), Gating("gelu")
    spec = product_spec(type, cols, n, mp.GATE_UP, cut, options=joins, gating=gelu)
    given = (gate.data, out, ff, 0, ff, up.data, out, ff, 0, ff, None, None, 0, 0, 0)
    start(build(spec, JOINED), cut, 1, [gate, up], h, w, EPS, *given, delta, post, 1e-6, scale, to)
    mean = delta.double().square().mean(-1, keepdim=True)
    stream = (h + delta / (mean + 1e-6).sqrt() * post) * scale
    assert_close(to, stream)
    x = normed(to, w, type)  # of the same bits, as rounding to 8 bits depends on them
    g, u = (x @ weights(m)[0].T for m in (gate, up))
    assert_close(out, torch.nn.functional.gelu(g, approximate="tanh") * u)


@pytest.mark.parametrize("name", ["IQ4_K", "F16"])
def test_matvec_set(build, name):
    """What was there is not read."""
    type, cols, rows = ggml_type(name), 1280, 20
    cut, m, x = plan(type, cols, 1, mp.MATVEC_ADD), matrix(name, rows, cols), draw(1, cols)
    out = torch.full((1, rows), float("nan"))
    spec = product_spec(type, cols, 1, mp.MATVEC_ADD, cut, options=("SETS",))
    given = (m.data, out, rows, 0, rows, *[None, None, 0, 0, 0] * 2)
    start(build(spec, DENSE), cut, 1, [m], x, None, 0.0, *given)
    assert_close(out, rounded(x, type) @ weights(m)[0].T)


def test_activations_that_are_tiny_or_huge(build):
    """Activations below 2^-120 count as 0. From 2^126 on, and for NaN, no result is finite."""
    type, cols, rows = ggml_type("Q8_0"), 1024, 20
    cut, m = plan(type, cols, 1, mp.MATVEC_ADD), matrix("Q8_0", rows, cols)
    library = build(product_spec(type, cols, 1, mp.MATVEC_ADD, cut), DENSE)

    def product(x):
        h = torch.zeros(1, rows)
        start(
            library, cut, 1, [m], x, None, 0.0, m.data, h, rows, 0, rows, *[None, None, 0, 0, 0] * 2
        )
        return h

    x, half = draw(1, cols), draw(1, cols)
    half[:, 512:] = 0
    without = product(half)
    for tiny in (1e-40, 1e-37):
        half[:, 512:] = tiny
        assert torch.equal(product(half), without)
    for huge in (1e38, float("inf"), float("nan")):
        x[0, 700] = huge
        assert not torch.isfinite(product(x)).any()
    x[0, 700] = 2.0**125
    assert torch.isfinite(product(x)).all()


def test_pairs_of_rows(build):
    """Three matrices of an even number of rows each; the last pair is of another matrix than the
    one before it.
    """
    type, cols = ggml_type("IQ3_S"), 768
    cut = plan(type, cols, 1, mp.NORM_MATVEC, stage_rows=2)
    ms = [matrix("IQ3_S", rows, cols, seed=i) for i, rows in enumerate((14, 2, 6))]
    h, w = draw(1, cols), draw(cols, seed=2)
    outs = [torch.full((1, m.rows), float("nan")) for m in ms]
    arguments = [
        a for m, out in zip(ms, outs, strict=True) for a in (m.data, out, m.rows, 0, m.rows)
    ]
    spec = product_spec(type, cols, 1, mp.NORM_MATVEC, cut, 3)
    start(build(spec, DENSE), cut, 1, ms, h, w, EPS, *arguments)
    for m, out in zip(ms, outs, strict=True):
        assert_close(out, normed(h, w) @ weights(m)[0].T)


@pytest.mark.parametrize("position", [0, 9])
def test_a_product_that_knows_the_position(build, position):
    """The result is the same on both sides of where attention may start at once: before that it
    starts after the wait.
    """
    type, cols = ggml_type("IQ4_K"), 768
    cut = plan(type, cols, 1, mp.NORM_MATVEC)
    m, h, w, out = matrix("IQ4_K", 22, cols), draw(1, cols), draw(cols, seed=2), torch.zeros(1, 22)
    spec = product_spec(type, cols, 1, mp.NORM_MATVEC, cut, 1, options=("LATE_BELOW",))
    library = build(spec, f"{DENSE}, const int* position, int below")
    none = [None, None, 0, 0, 0] * 2
    at = torch.tensor([position], dtype=torch.int32)
    start(library, cut, 1, [m], h, w, EPS, m.data, out, m.rows, 0, m.rows, *none, at, 5)
    assert_close(out, normed(h, w) @ weights(m)[0].T)
    threads = range(32 * cut.warps)
    library.starts_early.restype = library.starts_late.restype = ctypes.c_bool
    assert {library.starts_early(thread) for thread in threads} == {position >= 5}
    assert {library.starts_late(thread) for thread in threads} == {True}


def test_rows_are_taken_in_pairs_where_no_warp_has_more_of_them():
    here, type = mp.DeviceLimits(132, LIMIT, 114 << 10, 112 << 10), ggml_type("IQ4_KT")

    def rows_at_once(*rows, n=1, kind=mp.NORM_MATVEC, type=type):
        return here.plan(type, 4096, n, kind, rows).stage_rows

    assert rows_at_once(4096) == 2  # 2,112 warps have two rows each
    assert rows_at_once(4096, 1024, 1024) == 1  # three instead of four
    assert rows_at_once(2048) == 1
    assert rows_at_once(4095, 1) == 1
    assert rows_at_once(4096, n=2) == 1
    assert rows_at_once(4096, type=ggml_type("IQ4_K")) == 1
    assert rows_at_once(14336, kind=mp.GATE_UP) == 2


def test_rows_are_not_taken_in_pairs_where_only_one_fits():
    here, type = mp.DeviceLimits(84, 99 << 10, 50 << 10, 47 << 10), ggml_type("Q8_K_R8")
    space = mp.shared_space_of(type, here.shared)
    for cols, stage_rows in ((60416, 2), (60928, 1)):
        cut = here.plan(type, cols, 1, mp.MATVEC_ADD, [2688])
        assert cut.stage_rows == stage_rows and cut.shared <= space

"""The matrix-vector kernels run block by block on the CPU, compiled by g++: their plans, rings,
masks and sums.
"""

import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec.specs import float_expert_spec, quantized_spec
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec

from .matvec_host import DENSE, DOWN, GATES, LIMIT, NO_SHARED, host_kernel, plan, start
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
        build(quantized_spec(type, cols, n, mp.NORM_MATVEC, cut, 3), DENSE),
        cut,
        1,
        ms,
        h,
        w,
        EPS,
        *arguments,
    )
    for m, out in zip(ms, outs, strict=True):
        assert_close(out, normed(h, w) @ weights(m)[0].T)


def test_ranges_of_rows_without_a_norm(build):
    type, cols = ggml_type("Q8_0"), 1120
    cut, m, x = plan(type, cols, 2, mp.NORM_MATVEC), matrix("Q8_0", 20, cols), draw(2, cols)
    outs = [torch.full((2, rows), float("nan")) for rows in (13, 7)]
    spec = quantized_spec(type, cols, 2, mp.NORM_MATVEC, cut, 3, options=("PLAIN",))
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
    ],
)
def test_matvec_add(build, name, cols, changes, biased):
    type, n = ggml_type(name), 1
    cut, m = plan(type, cols, n, mp.MATVEC_ADD, **changes), matrix(name, 20, cols)
    x, h, bias = draw(n, cols), draw(n, 20, seed=2), draw(20, seed=3) if biased else None
    expected = h.double() + rounded(x) @ weights(m)[0].T
    if bias is not None:
        expected += bias
    start(
        build(quantized_spec(type, cols, n, mp.MATVEC_ADD, cut), DENSE),
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
        build(quantized_spec(type, cols, 1, mp.MATVEC_ADD, cut, bf16=True), DENSE),
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
        build(quantized_spec(type, cols, 1, mp.GATE_UP, cut, bf16=True), DENSE),
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
        build(quantized_spec(type, cols, 1, mp.GATE_UP, cut), DENSE),
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
    ("n", "cols"), [(1, 768), pytest.param(1, 1280, marks=pytest.mark.full), (3, 1280)]
)
def test_gelu_of_a_joined_stream(build, n, cols):
    """The stream is what the branch before and its norm make of it, whether a thread keeps its
    elements in registers or not, and is written once by all blocks together.
    """
    type, ff, scale = ggml_type("IQ4_K"), 11, 0.75
    cut = plan(type, cols, n, mp.GATE_UP)
    gate, up = matrix("IQ4_K", ff, cols), matrix("IQ4_K", ff, cols, seed=1)
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, ff), float("nan"))
    delta, post, to = draw(n, cols, seed=3), draw(cols, seed=4), torch.full((n, cols), float("nan"))
    joins, gelu = ("JOINS",), Gating("gelu")
    spec = quantized_spec(type, cols, n, mp.GATE_UP, cut, options=joins, gating=gelu)
    given = (gate.data, out, ff, 0, ff, up.data, out, ff, 0, ff, None, None, 0, 0, 0)
    start(build(spec, JOINED), cut, 1, [gate, up], h, w, EPS, *given, delta, post, 1e-6, scale, to)
    mean = delta.double().square().mean(-1, keepdim=True)
    stream = (h + delta / (mean + 1e-6).sqrt() * post) * scale
    assert_close(to, stream)
    x = normed(to, w)  # of the same bits, as rounding to 8 bits depends on them
    g, u = (x @ weights(m)[0].T for m in (gate, up))
    assert_close(out, torch.nn.functional.gelu(g, approximate="tanh") * u)


def test_matvec_set(build):
    """What was there is not read."""
    type, cols, rows = ggml_type("IQ4_K"), 1280, 20
    cut, m, x = plan(type, cols, 1, mp.MATVEC_ADD), matrix("IQ4_K", rows, cols), draw(1, cols)
    out = torch.full((1, rows), float("nan"))
    spec = quantized_spec(type, cols, 1, mp.MATVEC_ADD, cut, options=("SETS",))
    given = (m.data, out, rows, 0, rows, *[None, None, 0, 0, 0] * 2)
    start(build(spec, DENSE), cut, 1, [m], x, None, 0.0, *given)
    assert_close(out, rounded(x) @ weights(m)[0].T)


def test_activations_that_are_tiny_or_huge(build):
    """Activations below 2^-120 count as 0. From 2^126 on, and for NaN, no result is finite."""
    type, cols, rows = ggml_type("Q8_0"), 1024, 20
    cut, m = plan(type, cols, 1, mp.MATVEC_ADD), matrix("Q8_0", rows, cols)
    library = build(quantized_spec(type, cols, 1, mp.MATVEC_ADD, cut), DENSE)

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


@pytest.mark.parametrize("some_absent", [False, True])
@pytest.mark.parametrize(
    ("name", "cols", "ff", "changes"),
    [
        ("IQ4_K", 512, 768, {}),
        pytest.param("Q6_K", 512, 768, {}, marks=pytest.mark.full),
        ("Q8_0", 544, 96, {}),
        pytest.param("IQ4_KS", 512, 2304, {"stage_steps": 1, "slots": 2}, marks=pytest.mark.full),
        ("IQ2_KS", 512, 2304, {"stage_steps": 1, "slots": 2}),  # row headers in the first stage
        pytest.param("IQ4_KT", 512, 768, {}, marks=pytest.mark.full),
        pytest.param("IQ5_K", 512, 768, {}, marks=pytest.mark.full),
    ],
)
def test_experts(build, name, cols, ff, changes, some_absent):
    """There are three tokens and three slots, of which one token uses two, and one none. Expert
    matrices have more than one stage, and rows more than one round.
    """
    type, n, k, width = ggml_type(name), 3, 3, cols
    ids = torch.tensor([[4, 0, 2], [1, -1, 1], [-1, -1, -1]], dtype=torch.int32)
    gate, up, down = (
        matrix(name, 7, cols, 5),
        matrix(name, 7, cols, 5, seed=1),
        matrix(name, 14, ff, 5, seed=2),
    )
    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP, **changes)
    h, w, out = draw(n, width), draw(width, seed=2), torch.full((n, k, 7), float("nan"))
    start(
        build(
            quantized_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, some_absent=some_absent), GATES
        ),
        cut,
        n,
        [gate, up],
        h,
        w,
        EPS,
        gate.data,
        up.data,
        np.int64(gate.total_rows),
        7,
        0,
        ids,
        k,
        7,
        *[None] * 4,
        *NO_SHARED,
        np.int64(k * 7),
        out,
    )
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    g, u = (torch.einsum("nc,nkrc->nkr", normed(h, w), weights(m)[chosen]) for m in (gate, up))
    assert_close(out, silu(g) * u * used)
    x, by, to = draw(n, k, ff), draw(n, k, seed=3).abs(), draw(n, 14, seed=4)
    cut = plan(type, ff, k, mp.EXPERT_DOWN, **changes)
    y = torch.einsum("nkc,nkrc->nkr", rounded(x), weights(down)[chosen]) * by[..., None] * used
    expected = to.double() + y.sum(1)
    start(
        build(quantized_spec(type, ff, k, mp.EXPERT_DOWN, cut, some_absent=some_absent), DOWN),
        cut,
        n,
        [down],
        x,
        down.data,
        np.int64(down.total_rows),
        14,
        ids,
        by,
        None,
        None,
        None,
        to,
    )
    assert_close(to, expected)


def test_gate_and_up_of_two_types(build):
    """Two launches: the gate, then up, which joins them."""
    n, k, cols, spec = 2, 3, 576, FFNSpec("swiglu_oai", limit=0.5)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, k, 7), float("nan"))
    products = []
    for name, kind in (("Q8_0", mp.EXPERT_GATE), ("MXFP4", mp.EXPERT_GATE_BY)):
        type, m, bias = ggml_type(name), matrix(name, 7, cols, 5), draw(5, 7, seed=kind)
        cut = plan(type, cols, 1, kind)
        gating = Gating(spec.activation, spec.limit)
        kernel = quantized_spec(type, cols, 1, kind, cut, gating=gating, biased=True)
        data, stored = m.data, np.int64(m.total_rows)
        arguments = h, w, EPS, data, data, stored, 7, 0, ids, k, 7, bias, None, None, None
        start(build(kernel, GATES), cut, n, [m], *arguments, *NO_SHARED, np.int64(k * 7), out)
        y = torch.einsum("nc,nkrc->nkr", normed(h, w), weights(m)[chosen])
        products.append(y + bias[chosen])
    assert_close(out, gated(spec, *products) * used)


@pytest.mark.parametrize(("name", "scaled"), [("MXFP4", False), ("NVFP4", True)])
def test_experts_with_biases_and_scales(build, name, scaled):
    """As in gpt-oss: gate and up are merged, rows are no multiple of 256, and `swiglu_oai` clamps
    them.
    """
    type, n, k, cols, ff, spec = ggml_type(name), 2, 3, 576, 320, FFNSpec("swiglu_oai", limit=0.5)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    both, down = matrix(name, 14, cols, 5), matrix(name, 9, ff, 5, seed=2)
    gate_bias, bias = draw(5, 14, seed=5), draw(5, 9, seed=6)
    gate_scale, scale = (draw(5, seed=7), draw(5, seed=8)) if scaled else (None, None)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]

    def with_terms(y, bias, scale):
        return (y if scale is None else y * scale[chosen, None]) + bias[chosen]

    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP)
    kernel = quantized_spec(
        type,
        cols,
        1,
        mp.EXPERT_GATE_UP,
        cut,
        gating=Gating(spec.activation, spec.limit),
        biased=True,
        scaled=scaled,
    )
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, k, 7), float("nan"))
    start(
        build(kernel, GATES),
        cut,
        n,
        [both],
        h,
        w,
        EPS,
        both.data,
        both.data,
        np.int64(both.total_rows),
        14,
        7,
        ids,
        k,
        7,
        gate_bias,
        gate_bias,
        gate_scale,
        gate_scale,
        *NO_SHARED,
        np.int64(k * 7),
        out,
    )
    y = torch.einsum("nc,nkrc->nkr", normed(h, w), weights(both)[chosen])
    gate, up = with_terms(y, gate_bias, gate_scale).chunk(2, -1)
    assert (gate > 0.5).any() and (up < -0.5).any()
    assert_close(out, gated(spec, gate, up) * used)

    x, by, to = draw(n, k, ff), draw(n, k, seed=3).abs(), draw(n, 9, seed=4)
    cut = plan(type, ff, k, mp.EXPERT_DOWN)
    y = torch.einsum("nkc,nkrc->nkr", rounded(x), weights(down)[chosen])
    expected = to.double() + (with_terms(y, bias, scale) * by[..., None] * used).sum(1)
    kernel = quantized_spec(type, ff, k, mp.EXPERT_DOWN, cut, biased=True, scaled=scaled)
    start(
        build(kernel, DOWN),
        cut,
        n,
        [down],
        x,
        down.data,
        np.int64(down.total_rows),
        9,
        ids,
        by,
        bias,
        scale,
        None,
        to,
    )
    assert_close(to, expected)


@pytest.mark.parametrize("some_absent", [False, True])
@pytest.mark.parametrize(
    "name, ff, slots, changes, merged",
    [
        ("IQ4_K", 768, 2, {}, False),
        pytest.param("IQ4_KS", 768, 1, {}, True, marks=pytest.mark.full),
        pytest.param("Q8_0", 96, 2, {}, False, marks=pytest.mark.full),
        pytest.param(
            "IQ2_KS", 2304, 1, {"stage_steps": 1, "slots": 2}, False, marks=pytest.mark.full
        ),
        pytest.param("IQ4_NL", 1408, 2, {}, False, marks=pytest.mark.full),
    ],
)
def test_a_shared_expert(build, name, ff, slots, changes, merged, some_absent):
    """Next to experts with biases, which it does not have. Its rows are fewer than the warps, or
    more.
    """
    type, n, k, cols = ggml_type(name), 2, 3, 512
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    both, bias = matrix(name, 14, cols, 5), draw(5, 14, seed=5)
    h, w = draw(n, cols), draw(cols, seed=2)
    x = normed(h, w)
    expected = torch.einsum("nc,nkrc->nkr", x, weights(both)[chosen]) + bias[chosen]
    expected = gated(FFNSpec(), *expected.chunk(2, -1)) * used
    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP, **changes)
    options = {"biased": True, "some_absent": some_absent}
    kernel = quantized_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, shared=1, **options)
    library, size = build(kernel, GATES), (np.int64(both.total_rows), 14, 7, ids, k, 7)
    for rows in (4, 21):
        if merged:
            shared = [matrix(name, 2 * rows, cols, seed=11)] * 2
        else:
            shared = [matrix(name, rows, cols, seed=seed) for seed in (11, 12)]
        out, apart = (torch.full(size, float("nan")) for size in ((n, k * 7 + 1), (n, rows + 2)))
        terms = bias, bias, None, None
        mine = *(m.data for m in shared), np.int64(shared[0].total_rows), rows, apart
        pitches = np.int64(apart.stride(0)), np.int64(out.stride(0))
        start(
            library,
            cut,
            n,
            [both, *shared],
            h,
            w,
            EPS,
            both.data,
            both.data,
            *size,
            *terms,
            *mine,
            *pitches,
            out,
        )
        assert_close(out[:, : k * 7].reshape(n, k, 7), expected)
        products = [x @ weights(m)[0].T for m in (shared[:1] if merged else shared)]
        gate, up = products[0].chunk(2, -1) if merged else products
        assert_close(apart[:, :rows], silu(gate) * up)
        assert torch.isnan(out[:, -1]).all() and torch.isnan(apart[:, rows:]).all()
    if merged:
        return
    total, down = k + slots, matrix(name, 9, ff, 5, seed=2)
    shared, bias = matrix(name, 9, slots * ff, seed=13), draw(5, 9, seed=6)
    x, by, to = draw(n, total, ff), draw(n, total, seed=3).abs(), draw(n, 9, seed=4)
    cut = plan(type, ff, total, mp.EXPERT_DOWN, **changes)
    y = torch.einsum("nkc,nkrc->nkr", rounded(x[:, :k]), weights(down)[chosen]) + bias[chosen]
    always = (rounded(x) * by[..., None])[:, k:].flatten(1) @ weights(shared)[0].T
    expected = to.double() + (y * by[:, :k, None] * used).sum(1) + always
    kernel = quantized_spec(type, ff, total, mp.EXPERT_DOWN, cut, shared=slots, **options)
    arguments = x, down.data, np.int64(down.total_rows), 9, ids, by, bias, None, shared.data, to
    start(build(kernel, DOWN), cut, n, [down, shared], *arguments)
    assert_close(to, expected)


@pytest.mark.parametrize(
    "name, merged",
    [
        *(("BF16", False), ("BF16", True), ("F16", False), ("F32", False)),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("F16", "F32")),
    ],
)
def test_experts_of_floats(build, name, merged):
    """With biases, scales, and a shared expert of two slots, which has neither. Activations are not
    rounded. A row ends within the loads of a warp.
    """
    type, n, k, cols, ff, slots = ggml_type(name), 2, 3, 608, 352, 2
    cut = SimpleNamespace(shared=4 * cols)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    spec, rows = FFNSpec("swiglu_oai", limit=0.5), 21
    gates = (
        [matrix(name, 14, cols, 5)] * 2
        if merged
        else [matrix(name, 7, cols, 5, seed) for seed in (0, 1)]
    )
    first_up = 7 if merged else 0
    biases = [draw(5, 14, seed=5)] * 2 if merged else [draw(5, 7, seed=5), draw(5, 7, seed=6)]
    scales = [draw(5, seed=7).abs()] * 2
    always = (
        [matrix(name, 2 * rows, cols, seed=11)] * 2
        if merged
        else [matrix(name, rows, cols, seed=seed) for seed in (11, 12)]
    )
    h, w = draw(n, cols), draw(cols, seed=2)
    x = (h * w).double() / (h.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    products = [
        torch.einsum("nc,nkrc->nkr", x, weights(m)[chosen]) * scale[chosen, None] + bias[chosen]
        for m, scale, bias in zip(gates, scales, biases, strict=True)
    ]
    gate, up = products[0].chunk(2, -1) if merged else products
    out, apart = torch.full((n, k * 7 + 1), float("nan")), torch.full((n, rows + 2), float("nan"))
    terms = {"biased": True, "scaled": True}
    kernel = float_expert_spec(
        type, cols, 1, mp.EXPERT_GATE_UP, Gating(spec.activation, spec.limit), shared=1, **terms
    )
    start(
        build(kernel, GATES),
        cut,
        n,
        [*gates[: 2 - merged], *always[: 2 - merged]],
        h,
        w,
        EPS,
        *(m.data for m in gates),
        np.int64(gates[0].total_rows),
        14 if merged else 7,
        first_up,
        ids,
        k,
        7,
        *biases,
        *scales,
        *(m.data for m in always),
        np.int64(always[0].total_rows),
        rows,
        apart,
        np.int64(apart.stride(0)),
        np.int64(out.stride(0)),
        out,
    )
    assert_close(out[:, : k * 7].reshape(n, k, 7), gated(spec, gate.clone(), up.clone()) * used)
    both = [x @ weights(m)[0].T for m in always[: 2 - merged]]
    both = both[0].chunk(2, -1) if merged else both
    assert_close(apart[:, :rows], gated(spec, both[0].clone(), both[1].clone()))
    assert torch.isnan(out[:, -1]).all() and torch.isnan(apart[:, rows:]).all()

    total, down = k + slots, matrix(name, 9, ff, 5, seed=2)
    shared, bias, scale = matrix(name, 9, slots * ff, seed=13), draw(5, 9, seed=6), draw(5, seed=8)
    x, by, to = draw(n, total, ff), draw(n, total, seed=3).abs(), draw(n, 9, seed=4)
    y = torch.einsum("nkc,nkrc->nkr", x[:, :k].double(), weights(down)[chosen])
    y = (y * scale[chosen, None] + bias[chosen]) * by[:, :k, None] * used
    expected = to.double() + y.sum(1)
    expected += (x.double() * by[..., None])[:, k:].flatten(1) @ weights(shared)[0].T
    kernel = float_expert_spec(type, ff, total, mp.EXPERT_DOWN, shared=slots, **terms)
    cut, stored = SimpleNamespace(shared=4 * total * ff), np.int64(down.total_rows)
    arguments = x, down.data, stored, 9, ids, by, bias, scale, shared.data, to
    start(build(kernel, DOWN), cut, n, [down, shared], *arguments)
    assert_close(to, expected)


def test_gate_and_up_of_two_types_of_floats(build):
    n, k, cols, spec = 2, 3, 608, FFNSpec("gelu", limit=0.5)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, k, 7), float("nan"))
    x = (h * w).double() / (h.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    products, cut = [], SimpleNamespace(shared=4 * cols)
    for name, kind in (("BF16", mp.EXPERT_GATE), ("F16", mp.EXPERT_GATE_BY)):
        m, gating = matrix(name, 7, cols, 5), Gating(spec.activation, spec.limit)
        kernel = float_expert_spec(ggml_type(name), cols, 1, kind, gating)
        data, stored = m.data, np.int64(m.total_rows)
        arguments = h, w, EPS, data, data, stored, 7, 0, ids, k, 7, None, None, None, None
        start(build(kernel, GATES), cut, n, [m], *arguments, *NO_SHARED, np.int64(k * 7), out)
        products.append(torch.einsum("nc,nkrc->nkr", x, weights(m)[chosen]))
    assert_close(out, gated(spec, *products) * used)


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
    spec = quantized_spec(type, cols, 1, mp.NORM_MATVEC, cut, 3)
    start(build(spec, DENSE), cut, 1, ms, h, w, EPS, *arguments)
    for m, out in zip(ms, outs, strict=True):
        assert_close(out, normed(h, w) @ weights(m)[0].T)


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

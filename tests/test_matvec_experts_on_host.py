"""The matrix-vector kernels of experts run block by block on the CPU, compiled by g++."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec.specs import product_spec
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec

from .matvec_host import DOWN, GATES, NO_SHARED, host_kernel, plan, start
from .matvec_reference import EPS, assert_close, draw, matrix, normed, rounded, silu, weights

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return partial(host_kernel, tmp_path_factory.mktemp("matvec"))


EXPERTS = [
    ("IQ4_K", 512, 768, {}),
    ("Q8_0", 544, 96, {}),
    ("IQ2_KS", 512, 2304, {"stage_steps": 1, "slots": 2}),  # row headers in the first stage
    ("Q6_K", 512, 768, {}),
    ("IQ4_KS", 512, 2304, {"stage_steps": 1, "slots": 2}),
    ("IQ4_KT", 512, 768, {}),
    ("IQ5_K", 512, 768, {}),
    ("BF16", 608, 352, {}),
    ("F32", 352, 608, {}),
]
QUICK_EXPERTS = {  # type, divided, some_absent
    ("IQ4_K", False, False),
    ("IQ4_K", True, True),
    ("Q8_0", True, False),
    ("IQ2_KS", False, True),
    ("BF16", True, True),
}


@pytest.mark.parametrize(
    ("name", "cols", "ff", "changes", "divided", "some_absent"),
    [
        pytest.param(
            *(*case, divided, some_absent),
            marks=[] if (case[0], divided, some_absent) in QUICK_EXPERTS else pytest.mark.full,
        )
        for case in EXPERTS
        for divided in (False, True)
        for some_absent in (False, True)
    ],
)
def test_experts(build, name, cols, ff, changes, divided, some_absent):
    """There are three tokens and four slots, of which one token uses three, and one none. Expert
    matrices have more than one stage, and rows more than one round. divided: the slots of a row of
    `down` are, among warps.
    """
    type, n, k, width = ggml_type(name), 3, 4, cols
    ids = torch.tensor([[4, 0, 2, 3], [1, -1, 1, 0], [-1, -1, -1, -1]], dtype=torch.int32)
    gate, up, down = (
        matrix(name, 7, cols, 5),
        matrix(name, 7, cols, 5, seed=1),
        matrix(name, 14, ff, 5, seed=2),
    )
    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP, **changes)
    h, w, out = draw(n, width), draw(width, seed=2), torch.full((n, k, 7), float("nan"))
    start(
        build(product_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, some_absent=some_absent), GATES),
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
    g, u = (
        torch.einsum("nc,nkrc->nkr", normed(h, w, type), weights(m)[chosen]) for m in (gate, up)
    )
    assert_close(out, silu(g) * u * used)
    x, by, to = draw(n, k, ff), draw(n, k, seed=3).abs(), draw(n, 14, seed=4)
    cut = plan(type, ff, k, mp.EXPERT_DOWN, 14, **changes, **{"stage_rows": 2} if divided else {})
    y = torch.einsum("nkc,nkrc->nkr", rounded(x, type), weights(down)[chosen])
    expected = to.double() + (y * by[..., None] * used).sum(1)
    start(
        build(product_spec(type, ff, k, mp.EXPERT_DOWN, cut, some_absent=some_absent), DOWN),
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


@pytest.mark.parametrize("name", ["Q8_0", "F32"])
def test_gate_and_up_of_rows_as_they_are(build, name):
    """Without a norm, and one matrix as both, as in Nemotron 3 Super."""
    type, n, k, cols, gating = ggml_type(name), 2, 3, 576, Gating("relu")
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    m, cut = matrix(name, 7, cols, 5), plan(type, cols, 1, mp.EXPERT_GATE_UP)
    h, out = draw(n, cols), torch.full((n, k, 7), float("nan"))
    options = {"gating": gating, "some_absent": True, "options": ("PLAIN",)}
    kernel = product_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, **options)
    data, stored = m.data, np.int64(m.total_rows)
    arguments = h, None, 0.0, data, data, stored, 7, 0, ids, k, 7, *[None] * 4
    start(build(kernel, GATES), cut, n, [m, m], *arguments, *NO_SHARED, np.int64(k * 7), out)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    y = torch.einsum("nc,nkrc->nkr", rounded(h, type), weights(m)[chosen])
    assert_close(out, y.relu().square() * used)


@pytest.mark.parametrize("activation", ["swiglu_oai", "capped_silu"])
def test_gate_and_up_of_two_types(build, activation):
    """Two launches: the gate, then up, which joins them."""
    n, k, cols, spec = 2, 3, 576, FFNSpec(activation, limit=0.5)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, k, 7), float("nan"))
    products = []
    for name, kind in (("Q8_0", mp.EXPERT_GATE), ("MXFP4", mp.EXPERT_GATE_BY)):
        type, m, bias = ggml_type(name), matrix(name, 7, cols, 5), draw(5, 7, seed=kind)
        cut = plan(type, cols, 1, kind)
        gating = Gating(spec.activation, spec.limit)
        kernel = product_spec(type, cols, 1, kind, cut, gating=gating, biased=True)
        data, stored = m.data, np.int64(m.total_rows)
        arguments = h, w, EPS, data, data, stored, 7, 0, ids, k, 7, bias, None, None, None
        start(build(kernel, GATES), cut, n, [m], *arguments, *NO_SHARED, np.int64(k * 7), out)
        y = torch.einsum("nc,nkrc->nkr", normed(h, w), weights(m)[chosen])
        products.append(y + bias[chosen])
    assert_close(out, gated(spec, *products) * used)


@pytest.mark.parametrize(
    ("name", "scaled", "divided"), [("MXFP4", False, {"stage_rows": 1}), ("NVFP4", True, {})]
)
def test_experts_with_biases_and_scales(build, name, scaled, divided):
    """As in gpt-oss: gate and up are merged, rows are no multiple of 256, and `swiglu_oai` clamps
    them. divided: a warp has one slot of a row of `down` at a time.
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
    kernel = product_spec(
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
    cut = plan(type, ff, k, mp.EXPERT_DOWN, 9, **divided)
    y = torch.einsum("nkc,nkrc->nkr", rounded(x), weights(down)[chosen])
    expected = to.double() + (with_terms(y, bias, scale) * by[..., None] * used).sum(1)
    kernel = product_spec(type, ff, k, mp.EXPERT_DOWN, cut, biased=True, scaled=scaled)
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


SHARED = [
    ("IQ4_K", 768, 2, {}, False),
    ("IQ4_K", 768, 1, {"stage_rows": 2}, False),  # of `down`
    ("IQ4_KS", 768, 1, {}, True),
    ("Q8_0", 96, 2, {}, False),
    ("IQ2_KS", 2304, 1, {"stage_steps": 1, "slots": 2}, False),
    ("IQ4_NL", 1408, 2, {}, False),
]


@pytest.mark.parametrize(
    "name, ff, slots, changes, merged, some_absent",
    [
        (*SHARED[0], False),
        (*SHARED[1], True),
        *(
            pytest.param(*case, some_absent, marks=pytest.mark.full)
            for number, case in enumerate(SHARED)
            for some_absent in (False, True)
            if number != some_absent
        ),
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
    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP, **{**changes, "stage_rows": 2})
    options = {"biased": True, "some_absent": some_absent}
    kernel = product_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, shared=1, **options)
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
    cut = plan(type, ff, total, mp.EXPERT_DOWN, 9, **changes)
    y = torch.einsum("nkc,nkrc->nkr", rounded(x[:, :k]), weights(down)[chosen]) + bias[chosen]
    always = (rounded(x) * by[..., None])[:, k:].flatten(1) @ weights(shared)[0].T
    expected = to.double() + (y * by[:, :k, None] * used).sum(1) + always
    kernel = product_spec(type, ff, total, mp.EXPERT_DOWN, cut, shared=slots, **options)
    arguments = x, down.data, np.int64(down.total_rows), 9, ids, by, bias, None, shared.data, to
    start(build(kernel, DOWN), cut, n, [down, shared], *arguments)
    assert_close(to, expected)


@pytest.mark.parametrize(
    "name, merged",
    [
        *(("BF16", True), ("F16", False), ("F32", False)),
        pytest.param("BF16", False, marks=pytest.mark.full),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("F16", "F32")),
    ],
)
def test_experts_of_floats(build, name, merged):
    """With biases, scales, and a shared expert of two slots, which has neither. Activations are not
    rounded. A row ends within the loads of a warp.
    """
    type, n, k, cols, ff, slots = ggml_type(name), 2, 3, 608, 352, 2
    cut = plan(type, cols, 1, mp.EXPERT_GATE_UP)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    spec = FFNSpec("relu") if name == "F32" else FFNSpec("swiglu_oai", limit=0.5)
    rows = 21
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
    gating = Gating(spec.activation, spec.limit)
    kernel = product_spec(type, cols, 1, mp.EXPERT_GATE_UP, cut, gating=gating, shared=1, **terms)
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
    cut, stored = plan(type, ff, total, mp.EXPERT_DOWN, 9), np.int64(down.total_rows)
    kernel = product_spec(type, ff, total, mp.EXPERT_DOWN, cut, shared=slots, **terms)
    arguments = x, down.data, stored, 9, ids, by, bias, scale, shared.data, to
    start(build(kernel, DOWN), cut, n, [down, shared], *arguments)
    assert_close(to, expected)


def test_gate_and_up_of_two_types_of_floats(build):
    n, k, cols, spec = 2, 3, 608, FFNSpec("gelu", limit=0.5)
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    h, w, out = draw(n, cols), draw(cols, seed=2), torch.full((n, k, 7), float("nan"))
    x = (h * w).double() / (h.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    products = []
    for name, kind in (("BF16", mp.EXPERT_GATE), ("F16", mp.EXPERT_GATE_BY)):
        m, gating = matrix(name, 7, cols, 5), Gating(spec.activation, spec.limit)
        cut = plan(m.type, cols, 1, kind)
        kernel = product_spec(m.type, cols, 1, kind, cut, gating=gating)
        data, stored = m.data, np.int64(m.total_rows)
        arguments = h, w, EPS, data, data, stored, 7, 0, ids, k, 7, None, None, None, None
        start(build(kernel, GATES), cut, n, [m], *arguments, *NO_SHARED, np.int64(k * 7), out)
        products.append(torch.einsum("nc,nkrc->nkr", x, weights(m)[chosen]))
    assert_close(out, gated(spec, *products) * used)

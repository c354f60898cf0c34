"""Products with matrices that have a scale (`<name>.scale`): what is launched, by kernels that g++
compiles.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.common.gating import ExpertTerms, Gating
from iqforge.cuda_kernels.matvec import experts as matvec_experts
from iqforge.cuda_kernels.matvec import products as matvec
from iqforge.cuda_kernels.matvec.operands import Join, RowRange
from iqforge.cuda_kernels.matvec.plan import DeviceLimits
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec

from .matvec_host import BLOCKS, DENSE, DOWN, GATES, LIMIT, host_kernel, start
from .matvec_launches import replace_launches
from .matvec_reference import EPS, assert_close, draw, matrix, normed, rounded, silu, weights

NAMES = ["NVFP4", "IQ4_KS", "F16"]  # with a scale per 16, per row, and none
JOIN = "const float* delta, const float* post, float post_eps, float all, float* to"

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


def parameters(spec) -> str:
    """Return the parameters of a kernel, as its macros say."""
    [name], defines = spec.functions, dict(spec.defines)
    if not name.startswith("expert"):
        joins = [JOIN] if defines.get("JOINS") == "1" else []
        scales = ["float by0, float by1, float by2"] if defines.get("SCALED") == "1" else []
        return ", ".join([DENSE, *joins, *scales])
    first, scales = (DOWN, "float by") if "down" in name else (GATES, "float gate_by, float up_by")
    first = f"{first}, {scales}" if defines["SHARED_SCALED"] == "1" else first
    return f"{first}, const float* weighing" if defines["WEIGHED"] != "0" else first


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Run kernels on the CPU. Return the specs of all launches so far."""
    here, specs = DeviceLimits(BLOCKS, LIMIT, 114 << 10, 112 << 10), []

    def launch(spec, grid, block, *args, shared, pdl):
        blocks, tokens = (grid, 1) if isinstance(grid, int) else grid
        held = [SimpleNamespace(data=x) for x in args if x is not None and is_bytes(x)]
        library = host_kernel(tmp_path, spec, parameters(spec))
        given = [float(x) if isinstance(x, np.float32) else x for x in args]
        start(library, SimpleNamespace(shared=shared), tokens, held, *given, blocks=blocks)
        specs.append(spec)

    def is_bytes(x) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == torch.uint8

    replace_launches(monkeypatch, here, launch)
    return specs


def scaled(name, rows, cols, seed, scale):
    return replace(matrix(name, rows, cols, seed=seed), scale=scale)


def activations(name, h, w=None):
    """Return h or norm(h) as the kernels for a type have it."""
    type = ggml_type(name)
    return rounded(h, type) if w is None else normed(h, w, type)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_of_one_norm(launched, name):
    """Three in one launch, one of which has no scale, and rows of one alone."""
    cols, h, w = 1280, draw(2, 1280), draw(1280, seed=2)
    ms = [scaled(name, rows, cols, rows, by) for rows, by in ((13, 0.25), (2, 1.0), (5, -3.0))]
    outs = [torch.full((2, m.rows), float("nan")) for m in ms]
    matvec.norm_matvec(h, w, EPS, ms, outs)
    for m, out in zip(ms, outs, strict=True):
        bare = weights(replace(m, scale=1.0))[0]
        assert torch.equal(weights(m)[0], (bare.float() * m.scale).double())
        assert_close(out, activations(name, h, w) @ weights(m)[0].T)
    part = torch.full((2, 7), float("nan"))
    matvec.plain_matvec(h, [RowRange(ms[0], 5, 7)], [part])
    assert_close(part, activations(name, h) @ weights(ms[0])[0][5:12].T)
    assert len(launched) == 2


@pytest.mark.parametrize("name", NAMES)
def test_sums_and_their_bias(launched, name):
    """The bias and the sum so far are not scaled."""
    m, x, h = scaled(name, 20, 1280, 0, 0.125), draw(1, 1280), draw(1, 20, seed=2)
    bias, product = draw(20, seed=3), activations(name, x) @ weights(m)[0].T
    expected = h.double() + product + bias
    matvec.matvec_add(x, m, h, bias)
    assert_close(h, expected)
    matvec.matvec_set(x, m, h)
    assert_close(h, product)


@pytest.mark.parametrize(
    "name, other, joins",
    [
        *((name, name, False) for name in NAMES[1:]),
        ("NVFP4", "NVFP4", True),
        ("NVFP4", "IQ4_KS", True),
        ("NVFP4", "F16", False),
        ("F16", "F16", True),
        pytest.param("F16", "NVFP4", True, marks=pytest.mark.full),
        pytest.param("NVFP4", "NVFP4", False, marks=pytest.mark.full),
    ],
)
def test_gate_and_up(launched, name, other, joins):
    """Of one type in one launch, of two types in two."""
    h, w, out = draw(1, 1280), draw(1280, seed=2), torch.full((1, 11), float("nan"))
    gate, up = scaled(name, 11, 1280, 0, 0.5), scaled(other, 11, 1280, 1, 3.0)
    join = Join(draw(1, 1280, seed=3), draw(1280, seed=4), 1e-6, torch.empty_like(h), 0.75)
    matvec.gate_up(h, w, EPS, gate, up, out, join if joins else None)
    x = join.out if joins else h
    assert_close(
        out,
        silu(activations(name, x, w) @ weights(gate)[0].T)
        * (activations(other, x, w) @ weights(up)[0].T),
    )
    assert len(launched) == 1 + (name != other)


@pytest.mark.parametrize(
    "name, other, joins", [("NVFP4", "NVFP4", True), ("F16", "F16", False), ("NVFP4", "F16", True)]
)
def test_gate_and_up_without_a_norm(launched, name, other, joins):
    """Of the stream as it is; what is pending is normed and added first."""
    h, out = draw(1, 1280), torch.full((1, 11), float("nan"))
    gate, up = scaled(name, 11, 1280, 0, 0.5), scaled(other, 11, 1280, 1, 3.0)
    join = Join(draw(1, 1280, seed=3), draw(1280, seed=4), 1e-6, torch.empty_like(h), 1.0)
    matvec.gate_up(h, None, 0.0, gate, up, out, join if joins else None, plain=True)
    x = h
    if joins:
        delta = join.delta * torch.rsqrt(join.delta.square().mean() + 1e-6) * join.weight
        assert_close(join.out, (h + delta).double())
        x = join.out
    g, u = (activations(m, x) @ weights(w)[0].T for m, w in ((name, gate), (other, up)))
    assert_close(out, silu(g) * u)


@pytest.mark.parametrize("name", ["NVFP4", "BF16"])
def test_a_shared_expert(launched, name):
    """Next to experts with scales of their own."""
    n, k, cols, ff, rows, slots = 2, 3, 512, 704, 14, 2
    ids = torch.tensor([[4, 0, 2], [1, -1, 1]], dtype=torch.int32)
    chosen, used = ids.clamp(min=0).long(), (ids >= 0)[..., None]
    both, terms = matrix(name, 14, cols, 5), ExpertTerms(None, draw(5, seed=5))
    shared = [scaled(name, rows, cols, 11, 0.5), scaled(name, rows, cols, 12, 3.0)]
    h, w = draw(n, cols), draw(cols, seed=2)
    out, apart = torch.full((n, k, 7), float("nan")), torch.full((n, rows), float("nan"))
    matvec_experts.expert_gate_up(
        *(h, w, EPS, both, None, ids, out, Gating(), terms), shared=shared, shared_out=apart
    )
    x = activations(name, h, w)
    y = torch.einsum("nc,nkrc->nkr", x, weights(both)[chosen]) * terms.scale[chosen, None]
    assert_close(out, gated(FFNSpec(), *y.chunk(2, -1)) * used)
    gate, up = (x @ weights(m)[0].T for m in shared)
    assert_close(apart, silu(gate) * up)

    down, terms = matrix(name, 9, ff, 5, seed=2), ExpertTerms(None, draw(5, seed=8))
    own, total = scaled(name, 9, slots * ff, 13, 0.125), k + slots
    x, by, to = draw(n, total, ff), draw(n, total, seed=3).abs(), draw(n, 9, seed=4)
    rows_of_x = activations(name, x)
    y = torch.einsum("nkc,nkrc->nkr", rows_of_x[:, :k], weights(down)[chosen])
    expected = to.double() + (y * terms.scale[chosen, None] * by[:, :k, None] * used).sum(1)
    expected += (rows_of_x * by[..., None])[:, k:].flatten(1) @ weights(own)[0].T
    matvec_experts.expert_down_add(x, down, ids, by, to, terms, own)
    assert_close(to, expected)


@pytest.mark.parametrize("absent", [False, True])
def test_weights_of_what_experts_read(launched, absent):
    """They multiply products before the gate, but not those of a shared expert, whose slots follow
    those of the others.
    """
    name, n, k, cols, ff, slots = "Q8_0", 2, 2, 512, 7, 2
    ids = torch.tensor([[4, 0], [-1, 1]] if absent else [[4, 0], [2, 1]], dtype=torch.int32)
    gate, up = matrix(name, ff, cols, 5), matrix(name, ff, cols, 5, seed=1)
    shared = [matrix(name, slots * ff, cols, 1, seed=seed) for seed in (2, 3)]
    h, w, by = draw(n, cols), draw(cols, seed=2), draw(n, k + slots, seed=4).sigmoid()
    terms = ExpertTerms(None, draw(5, seed=6)), ExpertTerms(None, None)
    out = torch.full((n, k + slots, ff), float("nan"))
    matvec_experts.expert_gate_up(
        *(h, w, EPS, gate, up, ids, out, Gating(), *terms),
        shared=shared,
        weighing=by,
        some_absent=absent,
    )
    x, chosen = activations(name, h, w), ids.clamp(min=0).long()
    g, u = (
        torch.einsum("nc,nkrc->nkr", x, weights(m)[chosen]) * (scale * by[:, :k])[..., None]
        for m, scale in ((gate, terms[0].scale[chosen]), (up, 1))
    )
    assert_close(out[:, :k], silu(g) * u * (ids >= 0)[..., None])
    g, u = (x @ weights(m)[0].T for m in shared)
    assert_close(out[:, k:].flatten(1), silu(g) * u)

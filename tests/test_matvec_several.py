"""Products of several rows of activations on tensor cores, run block by block on the CPU, compiled
by g++: tiles, shares of warps, permuted activations, sums.
"""

import ctypes
import dataclasses
import shutil
from functools import partial

import pytest
import torch
from iqforge.cuda_kernels.common.gating import Gating
from iqforge.cuda_kernels.layouts.table import packed_types
from iqforge.cuda_kernels.matvec import plan as mp
from iqforge.cuda_kernels.matvec import products, several
from iqforge.cuda_kernels.matvec.operands import Join
from iqforge.formats.types import ggml_type
from iqforge.runtime.layers.ffn import gated
from iqforge.runtime.layers.specs import FFNSpec

from .matvec_host import BLOCKS, DENSE, LIMIT, host_kernel, start
from .matvec_reference import EPS, assert_close, draw, matrix, normed, rounded, silu, weights

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
NOTHING = (None, None, 0, 0, 0)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return partial(host_kernel, tmp_path_factory.mktemp("several"))


PARAMETERS = DENSE.replace(
    "const float* x, const float* norm", "const uint8_t* x, const float* bias"
)
ROUNDING = "const float* x, const float* weight, uint8_t* to"
JOINING = (
    ", const float* delta, const float* post_weight, float post_eps, float scale, float* stream"
)


def plan(type, cols, n, kind, rows, warps, split):
    """Return a real plan with other warps, `split` of which share a tile, and two slots."""
    cut = several.several_plan(type, cols, n, kind, rows, BLOCKS, LIMIT)
    more = several.sum_bytes(n, cut.warps) - several.sum_bytes(n, warps)
    more += (cut.warps * cut.slots - warps * 2) * several.stage_bytes(type, cols)
    return dataclasses.replace(cut, warps=warps, split=split, slots=2, shared=cut.shared - more)


def image(build, type, x, weight=None, joined=()):
    """Return rows of activations as the kernel rounds them. joined: the arguments of a branch that
    is finished first.
    """
    n, cols = x.shape
    half = x.dtype == torch.bfloat16
    spec = several.round_spec(type, cols, n, half, ("JOINS",) if joined else ())
    n_bytes = several.image_bytes(cols, n, several.sums_of(type, n))
    to = torch.zeros(n_bytes, dtype=torch.uint8)
    nothing = several.SeveralPlan(0, 0, 0, 0, 0)
    chunks = -(-cols // several.CHUNK)
    library = build(spec, ROUNDING + JOINING * bool(joined))
    start(library, nothing, n, [], x, weight, to, *joined, blocks=chunks)
    return to


def launch(build, spec, cut, matrices, x, bias, parts):
    """Run a product for rounded activations."""
    library = build(spec, PARAMETERS)
    library.memory(3, ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)))
    start(library, cut, 1, matrices, x, bias, EPS, *parts)


@pytest.mark.parametrize(
    ("name", "n", "cols", "warps", "split"),
    [
        ("IQ4_K", 3, 1280, 4, 4),
        ("IQ3_KS", 3, 1280, 2, 1),
        ("IQ5_K", 3, 1280, 2, 1),
        ("Q2_K", 3, 1280, 2, 2),
        ("Q3_K", 8, 1280, 4, 2),
        ("Q8_0", 5, 1120, 4, 4),
        ("IQ1_BN", 8, 1280, 2, 1),
    ],
)
@needs_compiler
def test_norm_matvec(build, name, n, cols, warps, split):
    """The rows of three matrices do not fill tiles, and a row ends within a step."""
    type, rows = ggml_type(name), (53, 2, 21)
    cut = plan(type, cols, n, mp.NORM_MATVEC, rows, warps, split)
    ms = [matrix(name, r, cols, seed=i) for i, r in enumerate(rows)]
    h, w = draw(n, cols), draw(cols, seed=2)
    outs = [torch.full((n, m.rows), float("nan")) for m in ms]
    spec = several.several_spec(type, cols, n, mp.NORM_MATVEC, cut, 3)
    parts = [a for m, out in zip(ms, outs, strict=True) for a in (m.data, out, m.rows, 0, m.rows)]
    launch(build, spec, cut, ms, image(build, type, h, w), None, parts)
    for m, out in zip(ms, outs, strict=True):
        assert_close(out, normed(h, w, type) @ weights(m)[0].T)


@needs_compiler
def test_gate_up_and_down(build):
    """Gate and up are one matrix, and what is between them and down is bf16."""
    type, n, cols, hidden = ggml_type("IQ2_XXS"), 3, 1280, 256
    gate_up, down = matrix("IQ2_XXS", 2 * hidden, cols), matrix("Q6_K", 20, hidden, seed=1)
    h, between = draw(n, cols), torch.zeros(n, hidden, dtype=torch.bfloat16)
    cut = plan(type, cols, n, mp.GATE_UP, (hidden,), 4, 2)
    spec = several.several_spec(type, cols, n, mp.GATE_UP, cut, 1, True)
    parts = [gate_up.data, between, hidden, 0, 2 * hidden]
    parts += [gate_up.data, between, hidden, hidden, 2 * hidden, *NOTHING]
    launch(build, spec, cut, [gate_up], image(build, type, h), None, parts)
    gate, up = (normed(h, None, type) @ weights(gate_up)[0].T).chunk(2, -1)
    assert_close(between, silu(gate) * up, 0.003)
    type, out, bias = down.type, draw(n, 20, seed=2), draw(20, seed=3)
    expected = out.double() + bias + rounded(between) @ weights(down)[0].T
    cut = plan(type, hidden, n, mp.MATVEC_ADD, (20,), 2, 1)
    spec = several.several_spec(type, hidden, n, mp.MATVEC_ADD, cut)
    parts = [down.data, out, 20, 0, 20, *NOTHING, *NOTHING]
    launch(build, spec, cut, [down], image(build, type, between), bias, parts)
    assert_close(out, expected)


@needs_compiler
def test_rounding_finishes_the_branch_before(build):
    type, n, cols = ggml_type("IQ4_K"), 3, 2304
    h, delta, after, w = (
        draw(n, cols),
        draw(n, cols, seed=1),
        draw(cols, seed=2),
        draw(cols, seed=3),
    )
    stream = torch.full((n, cols), float("nan"))
    joined = image(build, type, h, w, (delta, after, EPS, 0.5, stream))
    factor = (delta.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    assert_close(stream, (h + delta * factor * after) * 0.5, 1e-6)
    assert torch.equal(joined, image(build, type, stream, w))


def test_every_type_has_sums_and_parts():
    """The kernels' static assertions hold: see `test_kernels.py`, which compiles `specs()`."""
    specs = several.specs()
    types = {dict(spec.defines)["TYPE"] for spec in specs if "round" not in spec.name}
    assert types == {name for name in packed_types() if not ggml_type(name).is_float}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", [t for t in packed_types() if not ggml_type(t).is_float])
def test_products_on_a_gpu(name, n):
    """Each kind of product, with a norm, a branch to finish, a bias, a gate, and scales."""
    cols, hidden, close = 2816, 768, partial(assert_close, most=1e-4)
    sizes = (144, 16, 64) if "_R" in name else (133, 17, 64)  # interleaved rows, or any number
    ms = [matrix(name, rows, cols, seed=i, device="cuda") for i, rows in enumerate(sizes)]
    ms[1] = dataclasses.replace(ms[1], scale=0.5)
    gate, up = (matrix(name, hidden, cols, seed=i, device="cuda") for i in range(2))
    down = matrix(name, 2192, hidden, seed=2, device="cuda")
    on_gpu = partial(draw, device="cuda")
    h, w, delta = on_gpu(n, cols), on_gpu(cols, seed=2), on_gpu(n, cols, seed=3)
    outs = [torch.full((n, m.rows), float("nan"), device="cuda") for m in ms]
    with several.lent(several.space(h.device)):
        products.norm_matvec(h, w, EPS, ms, outs)
        for m, out in zip(ms, outs, strict=True):
            close(out, normed(h, w, m.type) @ weights(m)[0].T)
        products.plain_matvec(h, ms[:1], outs[:1])
        close(outs[0], rounded(h) @ weights(ms[0])[0].T)
        stream, between = torch.empty_like(h), torch.empty(n, hidden, device="cuda").bfloat16()
        join = Join(delta, w, EPS, stream, 0.5)
        products.gate_up(h, w, EPS, gate, up, between, join, Gating("gelu"))
        factor = (delta.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
        close(stream, (h + delta * factor * w) * 0.5)
        g, u = (normed(stream, w, m.type) @ weights(m)[0].T for m in (gate, up))
        assert_close(between, gated(FFNSpec("gelu"), g, u), 0.004)
        result, bias = on_gpu(n, 2192, seed=4), on_gpu(2192, seed=5)
        expected, again = result.clone(), result.clone()
        products.matvec_add(between, down, result, bias)
        products.matvec_add(between, down, again, bias)
    assert torch.equal(result, again)
    for row in range(n):  # a row alone is rounded in the same way, where bf16 ends in a tie, too
        products.matvec_add(between[row : row + 1], down, expected[row : row + 1], bias)
    assert_close(result, expected.double())

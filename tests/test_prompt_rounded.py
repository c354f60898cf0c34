"""Products of prompts in 8 bits: the kernels compiled by g++, and on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.cuda_kernels.prompt import rounded as prompt_rounded
from iqforge.runtime.bench.random_blocks import random_rows

from . import prompt_on_cpu
from .kernels_on_host import library, pointer

RUN = """
extern "C" void rows_of(const uint4* x, int rows, int cols, uint4* bytes, float* scales) {
    launch_on_host(rows, 1, (cols + 1023) / 1024 * 32,
                   [&] { rounded_rows(x, cols, bytes, scales); });
}
extern "C" void sums_of(const int4* sums, const float* of_rows, const float* of_columns,
                        const uint4* bias, int rows, int n, int stride, uint4* out) {
    launch_on_host(rows, (n + 2047) / 2048, 256,
                   [&] { scaled_sums(sums, of_rows, of_columns, bias, n, stride, out); });
}
"""
BEFORE = "struct int4 { int x, y, z, w; };\n#define fmaf(a, b, c) ((a) * (b) + (c))\n"


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16])
def kernels(tmp_path_factory, request):
    spec = prompt_rounded.spec(request.param)
    # the header for the CPU has a warp_sum already
    spec = replace(spec, defines=(*spec.defines, ("warp_sum", "prompt_warp_sum")))
    found = library(tmp_path_factory.mktemp("rounded"), spec, RUN, before=BEFORE)
    return request.param, found


def rounded(kernel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bytes, scales = torch.full(x.shape, 77, dtype=torch.int8), torch.full((len(x),), 7.0)
    kernel.rows_of(pointer(x), len(x), x.shape[1], pointer(bytes), pointer(scales))
    return bytes, scales


def product(kernel, half, x, w, bias=None) -> torch.Tensor:
    (a, of_rows), (b, of_columns) = rounded(kernel, x), rounded(kernel, w)
    sums = (a.int() @ b.int().T).contiguous()
    out = torch.full((len(x), len(w) + 8), 3.0, dtype=half)
    kernel.sums_of(
        pointer(sums),
        pointer(of_rows),
        pointer(of_columns),
        pointer(bias),
        len(x),
        len(w),
        out.shape[1],
        pointer(out),
    )
    assert bool((out[:, len(w) :] == 3).all())
    return out[:, : len(w)]


@pytest.mark.parametrize("cols", [128, 384, 1152])
def test_products_of_rounded_rows(kernels, cols):
    half, kernel = kernels
    x, w, bias = (torch.randn(n, cols).to(half) for n in (5, 24, 1))
    bias = bias[0, :24].contiguous()
    x[:, 7] *= 30  # a column of large values
    exact = x.double() @ w.double().T
    for terms in (None, bias):
        expected = exact if terms is None else exact + terms.double()
        found = product(kernel, half, x, w, terms).double()
        assert float((found - expected).norm() / expected.norm()) < 0.02


def test_rows_of_zeros_and_without_finite_numbers(kernels):
    half, kernel = kernels
    x, w = torch.randn(4, 256).to(half), torch.randn(8, 256).to(half)
    x[0], x[1, 3], x[2, 200] = 0, torch.nan, torch.inf
    found = product(kernel, half, x, w)
    assert not found[0].any() and not found[1:3].isfinite().any() and found[3].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cols", [128, 1152, 8192, 28672])
def test_products_on_a_gpu(half, cols):
    draw = torch.Generator("cuda").manual_seed(1)
    x, w, bias = (
        torch.randn(n, cols, generator=draw, device="cuda").to(half) for n in (48, 264, 1)
    )
    bias = bias[0].repeat(3)[:264].contiguous()
    x[:, 7] *= 30
    x[1] = 0
    (a, of_rows), (b, of_columns) = (
        (torch.empty_like(m, dtype=torch.int8), torch.empty(len(m), device="cuda")) for m in (x, w)
    )
    prompt_rounded.rounded_rows(x, a, of_rows)
    prompt_rounded.rounded_rows(w, b, of_columns)
    out = torch.full((48, 272), 3.0, dtype=half, device="cuda")
    sums = torch.ops.aten._int_mm(a, b.t())
    assert torch.equal(sums.double(), a.double() @ b.double().T)
    prompt_rounded.scaled_sums(sums, of_rows, of_columns, out[:, :264], bias)
    expected = x.double() @ w.double().T + bias.double()
    assert float((out[:, :264].double() - expected).norm() / expected.norm()) < 0.02
    assert bool((out[:, 264:] == 3).all()) and torch.equal(out[1, :264], bias)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_many_rows_on_a_gpu():
    """A chunk of perplexity may have more rows than a grid has blocks in its second direction."""
    sums = torch.arange(70_000, dtype=torch.int32, device="cuda")[:, None].repeat(1, 8)
    ones, out = torch.ones(70_000, device="cuda"), torch.zeros(70_000, 8, device="cuda").bfloat16()
    prompt_rounded.scaled_sums(sums, ones, ones[:8], out)
    assert torch.equal(out, (sums / 128).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["IQ4_K", "Q8_0", "IQ3_S", "IQ2_KT", "F32", "F16", "BF16"])
def test_packed_weights_on_a_gpu(name):
    """They are rounded as their values are."""
    cols = 1280
    blocks = random_rows(name, 40, cols, 1.0, np.random.default_rng(1))
    matrix = pack_matrix(name, [blocks], 40, cols, 1, "cuda")
    found, scales = torch.zeros(30, cols, dtype=torch.int8).cuda(), torch.zeros(30).cuda()
    prompt_rounded.rounded_weights(matrix, 7, found, scales)
    values = decode_matrix(matrix, torch.float32, first_row=7, n_rows=30).cpu()
    expected, of_rows = torch.empty(30, cols, dtype=torch.int8), torch.empty(30)
    prompt_on_cpu.rounded_rows(values, expected, of_rows)
    torch.testing.assert_close(scales.cpu(), of_rows, rtol=1e-5, atol=0)
    off = (found.cpu().int() - expected.int()).abs()
    assert int(off.max()) <= 1 and float(off.float().mean()) < 1e-3

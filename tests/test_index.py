"""Kernels that choose positions: compiled by g++ on the CPU, and on a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.attention import index
from iqforge.cuda_kernels.attention.index import IndexShape
from iqforge.runtime.layers.norm import LayerNorm
from iqforge.runtime.layers.rope import Rope

from .kernels_on_host import library, pointer

RUN = """
extern "C" void run_rows(float* q, const float* k, const float* weight, const float* bias,
                     float eps, const float* angles, void* cache, const int* position, int n) {
    launch_on_host((n * (HEADS + 1) + WARPS - 1) / WARPS, 1, THREADS, [&] {
        index_rows(q, k, weight, bias, eps, angles, cache, position, n);
    });
}
extern "C" void run_scores(const float* q, const float* weights, const uint4* keys,
                       const int* position, float* scores, int stride, int n) {
    launch_on_host((stride + THREADS - 1) / THREADS, 1, THREADS,
                   [&] { index_scores(q, weights, keys, position, scores, stride, n); });
}
extern "C" void run_select(const float* scores, const int* position, int stride, int* chosen,
                       int rows) {
    launch_on_host(rows, 1, SELECT, [&] { index_select(scores, position, stride, chosen); });
}
"""
GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


class OnHost:
    """The functions of `index`, of kernels that run on the CPU."""

    def __init__(self, folder, shape):
        self.kernels = library(folder, shape.spec, RUN)

    def index_rows(self, shape, q, k, norm, bias, eps, angles, cache, positions):
        pointers = map(pointer, (angles, cache, positions))
        self.kernels.run_rows(
            *map(pointer, (q, k, norm, bias)), ctypes.c_float(eps), *pointers, len(q)
        )

    def index_scores(self, shape, q, weights, cache, positions, scores):
        pointers = map(pointer, (q, weights, cache, positions, scores))
        self.kernels.run_scores(*pointers, scores.shape[1], len(q))

    def index_select(self, shape, scores, positions, chosen, pdl=True):
        pointers = map(pointer, (scores, positions))
        self.kernels.run_select(*pointers, scores.stride(0), pointer(chosen), len(chosen))


@pytest.fixture
def kernels(request, tmp_path):
    """kernels(device, shape): the functions that run the kernels there."""
    return lambda device, shape: OnHost(tmp_path, shape) if device == "cpu" else index


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "shape",
    [
        IndexShape(3, 64, 32, "F16", 8),
        IndexShape(32, 128, 64, "BF16", 2048, neox=True),
        IndexShape(4, 128, 64, "F32", 8),
    ],
    ids=str,
)
def test_scores(device, shape, kernels):
    """Queries are rotated, keys normed, rotated and stored, and every head adds to the scores."""
    run, s, n, n_past, capacity = kernels(device, shape), shape, 2, 300, 512
    g = torch.Generator().manual_seed(3)
    random = lambda *size: torch.randn(*size, generator=g).to(device)  # noqa: E731
    stored, close = {
        "F32": (torch.float32, 1e-5),
        "F16": (torch.float16, 1e-3),
        "BF16": (torch.bfloat16, 1e-2),
    }[s.type]
    cache = torch.full((capacity, 1, s.length), float("nan"), dtype=stored, device=device)
    cache[:n_past] = random(n_past, 1, s.length).to(stored)
    q, k, weights = random(n, s.heads, s.length), 2 + random(n, s.length), random(n, s.heads)
    norm = LayerNorm(1 + 0.1 * random(s.length), random(s.length), 1e-6)
    rope = Rope("neox" if s.neox else "norm", s.rotated, 10000.0, device=torch.device(device))
    positions = torch.arange(n_past, n_past + n, device=device)
    turn = rope.angles(positions)
    expected_q, key = rope(q, turn), rope(norm(k)[:, None], turn)
    angles = torch.stack(turn, -1).contiguous()
    run.index_rows(
        s, q.view(n, -1), k, norm.weight, norm.bias, norm.eps, angles, cache, positions.int()
    )
    torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=1e-5)
    found = cache[n_past : n_past + n].float()
    torch.testing.assert_close(found, key, rtol=close, atol=min(close, 1e-3))
    scores = torch.full((n, capacity), float("nan"), device=device)
    run.index_scores(s, q.view(n, -1), weights, cache, positions.int(), scores)
    keys = cache[: n_past + n, 0].double()
    dots = torch.einsum("nhd,md->nhm", q.double(), keys).relu()
    wanted = torch.einsum("nhm,nh->nm", dots, weights.double())
    torch.testing.assert_close(scores[:, : n_past + n].double(), wanted, rtol=1e-5, atol=1e-4)
    assert scores[:, n_past + n :].isnan().all()


def expected_choice(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the best positions, lower ones among equals, ascending, -1 after the last."""
    best = (-scores.double()).sort(stable=True).indices[:top_k].sort().values
    return torch.cat([best, best.new_full((max(0, top_k - len(best)),), -1)]).int()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("top_k", [5, 100, 2048])
def test_select(device, top_k, kernels):
    """Of few and many positions, with equal scores, zeros of both signs and negative scores."""
    shape = IndexShape(1, 32, 2, "F16", top_k)
    run, g = kernels(device, shape), torch.Generator().manual_seed(4)
    for n_past in (0, top_k - 2, top_k, 3 * top_k + 700):
        rows, stride = 3, n_past + 8
        many = torch.randn(rows, stride, generator=g)
        few = torch.randint(-2, 3, (rows, stride), generator=g).float() * 0.5
        few[:, ::3] *= -0.0
        for scores in (many, few, -many.abs(), torch.zeros(rows, stride)):
            chosen = torch.full((rows, top_k), -7, dtype=torch.int32, device=device)
            position = torch.tensor([n_past], dtype=torch.int32, device=device)
            run.index_select(shape, scores.to(device), position, chosen)
            for row in range(rows):
                wanted = expected_choice(scores[row, : n_past + row + 1], top_k)
                assert torch.equal(chosen[row].cpu(), wanted)

"""Scores of routers without a GPU: the kernel compiled by g++ agrees with float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from iqforge.cuda_kernels.prompt import scores as prompt_scores

from .kernels_on_host import BF16, RUN_SCORES, TF32, library, pointer


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    # the header for the CPU has a warp_sum already
    spec = replace(prompt_scores.SPEC, defines=(("warp_sum", "prompt_warp_sum"),))
    return library(tmp_path_factory.mktemp("scores"), spec, RUN_SCORES, before=TF32 + BF16)


@pytest.mark.parametrize(
    ("tokens", "n", "width", "processors"), [(70, 128, 448, 8), (5, 60, 160, 100), (64, 129, 32, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_float32(kernel, tokens, n, width, processors, dtype):
    x, stored = torch.randn(tokens, width), torch.randn(n, width).to(dtype)
    w, run = stored.float(), kernel.run_f32 if dtype == torch.float32 else kernel.run_bf16
    parts, depth = prompt_scores.plan(tokens, n, width, processors)
    out = torch.full((parts, tokens, n), float("nan"))
    run(pointer(x), pointer(stored), tokens, n, width, depth, parts, pointer(out))
    expected = x.double() @ w.double().T
    bound = x.double().abs() @ w.double().abs().T
    assert float(((out.double().sum(0) - expected).abs() / bound).max()) < 2**-21
    # Products of single TF32 numbers are far from that.
    x, w = ((a.view(torch.int32) & -(2**13)).view(torch.float32).double() for a in (x, w))
    assert float(((x @ w.T - expected).abs() / bound).max()) > 2**-16


def test_weights_are_shortened_without_loss():
    w = torch.randn(4, 32)
    assert prompt_scores.shortened(w) is w
    assert torch.equal(prompt_scores.shortened(w.bfloat16().float()), w.bfloat16())


@pytest.mark.parametrize(
    ("major", "limit", "taken"),
    [(7, 96, []), (8, 99, [torch.bfloat16]), (9, 227, [torch.float32, torch.bfloat16])],
)
def test_devices_with_less_shared_memory_take_shortened_weights(monkeypatch, major, limit, taken):
    """99 KiB are those of sm_86, sm_89 and sm_120."""
    facts = SimpleNamespace(shared_memory_per_block_optin=limit << 10, major=major)
    monkeypatch.setattr(prompt_scores, "_facts", lambda device: facts)
    kinds, device = (torch.float32, torch.bfloat16), torch.device("cuda")
    assert [x for x in kinds if prompt_scores.fits(128, 2048, device, x)] == taken


def test_a_part_is_no_shorter_than_needed():
    for tokens in (1, 16, 64, 512, 2048, 5000):
        for width in (32, 2048, 2880, 7168):
            parts, depth = prompt_scores.plan(tokens, 128, width, 132)
            assert 1 <= parts <= prompt_scores.MOST_PARTS
            assert (parts - 1) * depth < width // 32 <= parts * depth

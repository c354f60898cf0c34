"""The prompt path's choice and order of experts without a GPU: the kernels compiled by g++."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.cuda_kernels.prompt.experts import _EXPERTS_SPEC
from iqforge.runtime.cuda.common.expert_terms import routing_of
from iqforge.runtime.layers.moe import Router
from iqforge.runtime.layers.specs import RouterSpec

from .kernels_on_host import RUN_EXPERTS, library, pointer


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    # the header for the CPU has a warp_sum already
    return library(
        tmp_path_factory.mktemp("experts"),
        replace(_EXPERTS_SPEC, defines=(("warp_sum", "prompt_warp_sum"),)),
        RUN_EXPERTS,
    )


def route(
    kernels,
    logits: torch.Tensor,
    n_used: int,
    ser: tuple[int, float] | None = None,
    routing: Routing = Routing(),
    choice_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, n_experts = logits.shape[-2:]
    ids, weights = (
        torch.full((tokens, n_used), -7, dtype=torch.int32),
        torch.full((tokens, n_used), -7.0),
    )
    always, threshold = ser or (n_used, 0.0)
    kernels.route(
        pointer(logits),
        logits.numel() // (tokens * n_experts),
        pointer(bias),
        tokens,
        n_experts,
        n_used,
        always,
        ctypes.c_float(threshold),
        int(routing.sigmoid),
        int(routing.norm),
        ctypes.c_float(routing.scale),
        routing.groups,
        routing.groups_used,
        routing.group_best,
        None if choice_bias is None else pointer(choice_bias),
        pointer(ids),
        pointer(weights),
    )
    return ids, weights


@pytest.mark.parametrize("ser", [None, (1, 0.4)])
def test_routing(kernels, ser):
    logits = 2 * torch.randn(7, 60, generator=torch.Generator().manual_seed(1))
    logits[0] = logits[0].round()  # equal ones: the lower expert first
    ids, weights = route(kernels, logits, 5, ser)
    top, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    top, order = top[:, :5], order[:, :5]
    if ser:
        kept = top > ser[1] * top[:, :1]
        assert 0 < int(kept.sum()) < kept.numel()
        top, order = top * kept, torch.where(kept, order, -1)
    assert torch.equal(ids, order.to(torch.int32))
    assert torch.allclose(weights.double(), top / top.sum(-1, keepdim=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "biased"),
    [
        (RouterSpec(60, 5, "sigmoid", scale=2.5), True),
        (RouterSpec(60, 5, "softmax", norm=False, scale=0.5), False),
        (RouterSpec(60, 6, "softmax"), True),
        (RouterSpec(32, 4, "selected", norm=False), False),
        (RouterSpec(60, 5, "sigmoid", 6, 2, 2, scale=1.8), True),
        (RouterSpec(60, 4, "softmax", 4, 3, 1, norm=False), False),
    ],
)
def test_all_ways_to_choose_are_the_reference_s(kernels, spec, biased):
    rng = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(9, spec.n_experts, generator=rng)
    logits[0] = logits[0].round()
    bias = torch.randn(spec.n_experts, generator=rng) if biased else None
    if bias is not None:
        bias[7] = float("-inf")  # an expert that nobody may choose
    router = Router(SimpleNamespace(bias=None), spec, bias)
    chosen, shares = router.choose(logits)
    ids, weights = route(kernels, logits, spec.n_used, None, routing_of(router), bias)
    assert torch.equal(ids.long(), chosen)
    assert torch.allclose(weights, shares, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tokens_without_numbers_have_places(kernels, bad):
    """Their weights are NaN, but their experts exist, as rows without an expert would be read
    otherwise.
    """
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    logits[1] = bad
    logits[2, 3] = float("nan") if bad < 0 else bad
    ids, weights = route(kernels, logits, 4)
    assert weights[1:].isnan().all() and torch.isfinite(weights[0]).all()
    assert bool((ids >= 0).all()) and bool((ids < 40).all())
    assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.parametrize("biased", [False, True])
def test_logits_in_parts(kernels, biased):
    parts = 2 * torch.randn(3, 7, 60, generator=torch.Generator().manual_seed(5))
    bias = torch.randn(60) if biased else None
    ids, weights = route(kernels, parts, 5, bias=bias)
    whole = parts[0] + parts[1] + parts[2]
    wanted_ids, wanted = route(kernels, whole if bias is None else whole + bias, 5)
    assert torch.equal(ids, wanted_ids) and torch.equal(weights, wanted)


# With 32,768 ids or fewer a thread keeps its own.
@pytest.mark.parametrize("n", [1, 4, 1001, 16384, 20480, 32766, 32768, 32769, 70000])
@pytest.mark.parametrize(("low", "n_experts"), [(-1, 5), (0, 12)])
def test_rows_are_grouped_in_order(kernels, n, low, n_experts):
    """There are experts without rows, and ids below 0."""
    ids = torch.randint(low, n_experts, (n,), dtype=torch.int32)
    ids[ids == 1] = 2
    ids[n // 4 : n // 2] = n_experts - 1  # one has most of them
    ends, sources, rows = (torch.full((size,), -7, dtype=torch.int32) for size in (n_experts, n, n))
    kernels.group(pointer(ids), n, n_experts, pointer(ends), pointer(sources), pointer(rows))
    order = ids.argsort(stable=True)
    order = order[ids[order] >= 0]
    expected = torch.full((n,), -1, dtype=torch.int32)
    expected[order] = torch.arange(len(order), dtype=torch.int32)
    assert ends.tolist() == torch.bincount(ids[ids >= 0], minlength=n_experts).cumsum(0).tolist()
    assert torch.equal(sources[: len(order)], order.to(torch.int32)) and bool(
        (sources[len(order) :] == -1).all()
    )
    assert torch.equal(rows, expected)

"""Experts on the CPU under a GPU: as a program, for few rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cpu.offloaded import OffloadedExperts, offload_experts
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import Placed
from iqforge.runtime.cuda.prompt.layer_input import PromptLayerInputs
from iqforge.runtime.layers.layer_input import LayerInputs
from iqforge.runtime.layers.moe import MoE
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.model import Model
from iqforge.runtime.weights.stacked_linear import ExpertLinear


def moe_of(model: Model) -> MoE:
    modules = [branch.module for block in model.network.blocks for branch in block.branches]
    return next(module for module in modules if isinstance(module, MoE))


@pytest.fixture(scope="module")
def model():
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0")) as model:
        yield model


@pytest.mark.parametrize(("rounds", "tolerance"), [(False, 1e-5), (True, 2e-2)])
def test_few_rows_are_those_of_the_layer(model, rounds, tolerance):
    module, weights = moe_of(model), model.weights
    few = OffloadedExperts(module, weights.store, weights.taps, rounds=rounds)
    for n in (1, 4, 2):
        x = torch.randn(n, model.network.width)
        chosen, shares = module.router(x)
        expected, found = module.mix(x, chosen, shares), few(x, chosen, shares)
        assert found is not None
        assert (found - expected).norm() <= tolerance * expected.norm()
    assert few(torch.randn(5, model.network.width), chosen, shares) is None


@pytest.mark.parametrize(("rounds", "tolerance"), [(False, 1e-5), (True, 2e-2)])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_experts_of_other_ranks_are_left_out(model, rounds, tolerance, n_threads, monkeypatch):
    """No row has all its experts here, and one has none."""
    module, weights = moe_of(model), model.weights
    n_experts, used = module.spec.n_experts, module.spec.n_used
    first, end = n_experts // 2, n_experts - 1
    x = torch.randn(4, model.network.width)
    chosen = torch.arange(4 * used).view(4, used) * 3 % n_experts
    chosen[2] = torch.arange(used) % first
    shares, is_here = torch.rand(4, used), (chosen >= first) & (chosen < end)
    assert is_here.any() and not is_here.all(1).any() and not is_here[2].any()
    expected = module.mix(x, (chosen - first) * is_here, shares * is_here)
    monkeypatch.setattr(module, "owned", (first, end))
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    few = OffloadedExperts(module, weights.store, weights.taps, rounds=rounds)
    found = few(x, chosen, shares)
    assert found is not None and not found[2].any()
    assert (found - expected).norm() <= tolerance * expected.norm()


def test_observers_see_every_product(model):
    module, weights = moe_of(model), model.weights
    few = OffloadedExperts(module, weights.store, weights.taps, rounds=False)
    x = torch.randn(1, model.network.width)
    with model.observe(lambda *_: None):
        assert few(x, *module.router(x)) is None


def test_only_layers_below_a_gpu_have_them(model):
    offload_experts(model.network, model.weights.store, model.weights.taps, rounds=True)
    assert moe_of(model).few_rows is None
    block = model.network.blocks[0]
    before, block.device = block.device, torch.device("meta")
    offload_experts(model.network, model.weights.store, model.weights.taps, rounds=True)
    block.device = before
    module = block.branches[1].module
    assert isinstance(module, MoE) and module.few_rows is not None
    x = torch.randn(1, model.network.width)
    rounded = module(x)
    module.few_rows = None
    exact = module(x)
    assert 0 < (rounded - exact).norm() <= 2e-2 * exact.norm()


def test_terms_of_experts_are_where_their_products_are(model):
    """While a step waits for experts on the CPU, it cannot copy their biases from the GPU."""
    there = SimpleNamespace(device=torch.device("meta"))
    terms = {"bias": torch.ones(2, 3), "scale": torch.ones(2)}
    linear = ExpertLinear("x", [there], model.weights.taps, role="", split="", **terms)  # pyright: ignore[reportArgumentType]  only the device is used
    assert linear.bias is not None and linear.scale is not None
    assert linear.bias.device.type == linear.scale.device.type == "meta"


def test_inputs_of_layers_are_computed_where_their_weights_are():
    """Embeddings can be on another device."""

    class Projection:
        cols = 8

        def __call__(self, h):
            return h.new_ones(2, 12)

    norm = RMSNorm(torch.ones(4, device="meta"), 1e-6)
    inputs = LayerInputs(lambda tokens: torch.ones(2, 12), Projection(), norm)  # pyright: ignore[reportArgumentType]  a table and a projection
    found = inputs(torch.zeros(2, dtype=torch.int64), torch.ones(2, 8))
    assert found.device.type == "meta" and found.shape == (2, 3, 4)
    with pytest.raises(Placed, match="norm of inputs of layers"):
        PromptLayerInputs(inputs, Context(torch.device("cpu")))

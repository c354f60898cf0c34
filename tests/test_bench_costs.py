"""The figures that `iqforge bench` computes GB/s and FLOP/s from."""

from __future__ import annotations

import pytest
import torch
from iqforge.runtime.bench.cost import Cost
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.device_facts import facts_of
from iqforge.runtime.model import Model


def test_costs():
    """Costs equal sums written out here, and the specification's figures for real shapes (GB per
    token with an empty context).
    """
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0"), torch.device("cpu")) as model:
        state = model.new_state(100)
        cost = Cost.of(model, state)
        attention, experts = 2 * 256 * 512 + 2 * 256 * 256, 3 * 256 * 256
        assert cost.token_flop == 2 * 2 * (attention + 8 * 256 + 2 * experts)
        assert cost.output_flop == 2 * 512 * 256
        # Layers, keys and values, heads, head size, bytes.
        position = 2 * 2 * 2 * 128 * 2
        # One row of the embedding, too.
        quantized = (2 * (attention + 2 * experts) + 513 * 256) / 32 * 34
        floats = 4 * (2 * (8 * 256 + 2 * 256 + 2 * 128) + 256)
        assert cost.step_bytes == quantized + floats
        assert cost.generation_bytes(10, 3) == 3 * cost.step_bytes + position * (11 + 12 + 13)
        assert Cost.of(model).generation_bytes(10, 3) == 3 * cost.step_bytes
        # Two batches: the last block is needed for one token of each, after the keys and values of
        # all three.
        last, pairs = 2 * (2 * 256 * 512 + 8 * 256 + 2 * experts), 2 * 4 * 2 * 128
        assert cost.last_flop == last
        assert cost.prompt_flop(10, 3, 2) == (
            3 * (cost.token_flop - last)
            + 2 * (last + cost.output_flop)
            + pairs * (11 + 12 + 13)
            + pairs * (12 + 13)
        )


@pytest.mark.parametrize(
    "spec, gigabytes",
    [
        ("llama-8b:Q8_0", 7.97),
        ("llama-8b:IQ4_KS", 4.14),
        ("llama-8b:IQ2_K", 2.50),
        ("qwen3-30b-a3b:IQ4_KS", 1.75),
    ],
)
def test_bytes_per_token_of_real_shapes(spec, gigabytes):
    with Model(SyntheticSource(spec), torch.device("cpu")) as model:
        assert Cost.of(model).step_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_limits_of_devices():
    class Properties:
        name, major, minor, multi_processor_count, total_memory, L2_cache_size = (
            "NVIDIA H200",
            9,
            0,
            132,
            150 * 10**9,
            60 * 10**6,
        )
        memory_clock_rate, memory_bus_width, clock_rate = 1, 1, 1

    assert (
        facts_of(Properties).bandwidth == 4.8e12 and "4800 GB/s" in facts_of(Properties).describe()
    )
    Properties.name, Properties.major, Properties.minor, Properties.multi_processor_count = (
        "NVIDIA GeForce RTX 4090",
        8,
        9,
        128,
    )
    Properties.memory_clock_rate, Properties.memory_bus_width, Properties.clock_rate = (
        10501000,
        384,
        2520000,
    )
    assert facts_of(Properties).bandwidth == pytest.approx(1008e9, rel=0.01)
    assert facts_of(Properties).bf16_rate == pytest.approx(165e12, rel=0.01)
    Properties.clock_rate = Properties.memory_clock_rate = 0
    assert facts_of(Properties).bandwidth is None and facts_of(Properties).bf16_rate is None

"""The split plan: what ranks hold, and that together they compute the model."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from iqforge.errors import UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import Source
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.layers.block import Block
from iqforge.runtime.model import load_model
from iqforge.runtime.network.network import Network
from iqforge.runtime.parallel.apportion import Balanced, normalized
from iqforge.runtime.parallel.planner import NoPlanError, plan_split
from iqforge.runtime.split_model import make_plan, network_of
from iqforge.runtime.weights.shard import local_tensor, unit_of
from iqforge.runtime.weights.split_plan import NOTHING, length

from .golden import GOLDEN
from .seed import run_seed
from .shared import shared
from .thread_ranks import logits_on_ranks

SHARES = ((1, 1), (1, 1, 1), (5, 2, 1), (1, 0), (1,) * 8)


@functools.cache
def opened(model) -> tuple[Source, Network]:
    """The source and the whole network of a file, or of a known shape."""
    source = SyntheticSource(model) if isinstance(model, str) else open_gguf(model)
    return source, network_of(source)


class Other:
    """A kind of layer that no plan knows."""


def golden(name: str):
    return shared(f"golden/convert/{name}/expected-f32.gguf")


def counts(plan, field: str, unit: int = 1) -> list[str]:
    """The units of every rank, a layer at a time, as in 2+3+3."""
    found = []
    for layer in plan.layers:
        sizes = [getattr(part, field) for part in layer]
        numbers = [len(s) if field == "kv_heads" else length(s) // unit for s in sizes]
        found.append("+".join(map(str, numbers)))
    return found


def layer_bytes(plan, source) -> list[int]:
    """Bytes of the tensors of layers on every rank."""
    return [
        sum(
            0 if (local := local_tensor(t, plan.of(t.name), rank)) is None else local.n_bytes
            for t in source.tensors
            if t.name.startswith("blk.")
        )
        for rank in range(plan.n_ranks)
    ]


@pytest.mark.parametrize(
    "shares, heads, columns",
    [
        ((1, 1), ["4+4"] * 32, ["28+28"] * 32),
        (
            (1, 1, 1),
            ["2+3+3", "2+3+3", "2+3+3", "3+3+2", "3+2+3", "2+3+3"],
            ["23+17+16", "17+19+20", "19+18+19", "18+19+19"],
        ),
        ((2, 1), ["7+1", "6+2", "5+3", "5+3"], ["26+30", "42+14", "39+17", "38+18"]),
        ((3, 1), ["8+0", "7+1", "6+2"], ["28+28", "48+8", "43+13"]),
    ],
)
def test_the_reference_distributes_llama_8b_so(shares, heads, columns):
    plan = make_plan(SyntheticSource("llama-8b:BF16"), shares, reference=True, column_steps=(256,))
    assert counts(plan, "kv_heads")[: len(heads)] == heads
    assert counts(plan, "ffn", 256)[: len(columns)] == columns


def test_the_reference_evens_bytes_out():
    source = SyntheticSource("llama-8b:BF16")
    plan = make_plan(source, (1, 1, 1), reference=True, column_steps=(256,))
    sizes = layer_bytes(plan, source)
    assert [round(100 * size / sum(sizes), 2) for size in sizes] == [33.35, 33.32, 33.32]


@pytest.mark.parametrize(
    "shares, heads, columns",
    [
        ((1, 1), ["2+2", "3+1", "2+2"], ["1+2", "2+1", "1+2", "2+1"]),
        ((1,) * 4, ["1+1+1+1", "2+0+1+1", "1+1+1+1"], ["0+1+1+1", "1+1+0+1", "1+1+1+0"]),
    ],
)
def test_the_reference_distributes_qwen3_30b_so(shares, heads, columns):
    plan = make_plan(SyntheticSource("qwen3-30b-a3b:IQ4_KS"), shares, reference=True)
    assert counts(plan, "kv_heads")[:3] == heads
    assert counts(plan, "expert_ffn", 256)[: len(columns)] == columns


def test_rounding_is_carried_from_layer_to_layer():
    plan = make_plan(SyntheticSource("llama-8b:IQ4_K"), (1, 1, 1))
    assert counts(plan, "kv_heads")[:4] == ["3+3+2", "3+2+3", "2+3+3", "3+3+2"]
    source = SyntheticSource("llama-8b:IQ4_K")
    sizes = layer_bytes(plan, source)
    assert max(sizes) / min(sizes) < 1.01


def test_experts_are_whole_where_columns_do_not_divide():
    # 768 hidden columns are 3 blocks of 256.
    source = SyntheticSource("qwen3-30b-a3b:IQ4_K")
    four = make_plan(source, (1,) * 4).layers[0]
    assert [part.experts for part in four] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert {part.expert_mode for part in four} == {"whole"}
    three = make_plan(source, (1,) * 3).layers[0]
    assert [part.expert_ffn for part in three] == [(0, 256), (256, 512), (512, 768)]
    forced = make_plan(source, (1,) * 4, experts="columns").layers[0]
    assert [length(part.expert_ffn) for part in forced] == [256, 256, 256, 0]


def test_key_value_heads_are_copied_for_more_ranks():
    # qwen3.5 has 2 key/value heads for 16 query heads.
    plan = make_plan(SyntheticSource("qwen3.5-35b-a3b:IQ4_K"), (1,) * 4)
    layer = next(layer for layer in plan.layers if layer[0].heads != NOTHING)
    assert [part.heads for part in layer] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert [part.kv_heads for part in layer] == [(0,), (0,), (1,), (1,)]
    three = make_plan(SyntheticSource("qwen3.5-35b-a3b:IQ4_K"), (1,) * 3)
    layer = next(layer for layer in three.layers if layer[0].heads != NOTHING)
    for part in layer:
        # Every group of local query heads reads one head.
        group, rest = divmod(part.n_heads, part.n_kv_heads)
        read = [head // 8 for head in range(*part.heads)]
        assert not rest and read == [kv for kv in part.kv_heads for _ in range(group)]


def test_merged_gate_and_up_are_cut_twice():
    plan = make_plan(SyntheticSource("qwen3.5-35b-a3b:IQ4_K"), (1, 1), experts="columns")
    name = next(name for name in plan.tensors if name.endswith("ffn_gate_up_exps.weight"))
    assert plan.of(name).ranges == (((0, 256), (512, 768)), ((256, 512), (768, 1024)))


def test_value_heads_of_a_tiled_delta_net_are_several_ranges():
    source = SyntheticSource("qwen3.5-35b-a3b:IQ4_K")
    plan = make_plan(source, (1, 1))
    name = next(name for name in plan.tensors if name.endswith("ssm_out.weight"))
    ranges = plan.of(name).ranges[1]
    assert len(ranges) > 1 and plan.of(name).sum_after
    assert {length(r) for r in ranges} == {length(ranges[0])}


def test_units_add_up_and_rounding_stays_small():
    rng = np.random.default_rng(run_seed())
    for _ in range(200):
        n_ranks = int(rng.integers(2, 9))
        shares = normalized([float(x) for x in rng.integers(0, 6, n_ranks - 1)] + [1.0])
        balanced, n = Balanced(shares), int(rng.integers(1, 60))
        given = np.zeros(n_ranks)
        for _ in range(24):
            counts = balanced.units(n, "heads")
            assert sum(counts) == n and min(counts) >= 0
            active = [count for count, share in zip(counts, shares, strict=True) if share]
            assert sum(active) == n
            assert n < len(active) or min(active) >= 1
            given += counts
        if n * min(share for share in shares if share) >= 1:  # nobody is lifted to one unit
            assert np.abs(given - 24 * n * np.array(shares)).max() <= 1.5


@pytest.mark.parametrize("shares", [(1,), (), (0, 0), (1, -1), (1, float("nan"))])
def test_shares_that_are_not_possible_are_refused(shares):
    with pytest.raises(UsageError, match="-ts"):
        make_plan(SyntheticSource("llama-8b:IQ4_K"), shares)


def test_layers_without_a_plan_are_named():
    source = SyntheticSource("llama-8b:IQ4_K")
    network = network_of(source)
    block = network.blocks[2]
    mixer, ffn = block.branches
    other = Block((mixer, replace(ffn, module=Other())), block.device)
    blocks = [*network.blocks[:2], other, *network.blocks[3:]]
    with pytest.raises(NoPlanError, match="layer 2 has a Other, for which there is no split plan"):
        plan_split(replace(network, blocks=blocks), source.tensors, (1, 1))


def test_shared_keys_and_values_need_the_same_heads():
    source = SyntheticSource("llama-8b:IQ4_K")
    network = network_of(source)
    attention = network.blocks[1].mixer
    attention.spec = replace(attention.spec, kv_from=0, heads=16)
    with pytest.raises(NoPlanError, match="layer 1 uses the keys and values of layer 0"):
        plan_split(network, source.tensors, (1, 1))


def check_cover(plan, source) -> None:
    """Every element of every tensor is on a rank, once unless it is copied, in cuts that its type
    allows.
    """
    for tensor in source.tensors:
        split = plan.of(tensor.name)
        locals_ = [local_tensor(tensor, split, rank) for rank in range(plan.n_ranks)]
        held = [t for t in locals_ if t is not None]
        if split.kind == "copy":
            assert held == [tensor] * plan.n_ranks
            continue
        if split.kind == "one":
            assert held == [tensor]
            continue
        n = tensor.shape[split.axis]
        seen = np.zeros(n, dtype=int)
        unit = unit_of(tensor, split.axis)
        for ranges in split.ranges:
            for start, stop in ranges:
                assert start < stop and start % unit == stop % unit == 0
                seen[start:stop] += 1
        assert seen.min() >= 1, (tensor, split)
        copies = tensor.name.rpartition(".")[0].endswith(("attn_k", "attn_v", "attn_qkv"))
        if not copies:
            assert seen.max() == 1, (tensor, split)
            heads = tensor.type.header_bytes * tensor.n_rows * (len(held) - 1)
            cut = split.kind == "columns" or tensor.type.row_bytes == 0
            assert sum(t.n_bytes for t in held) == tensor.n_bytes + cut * heads


@pytest.mark.parametrize("shares", SHARES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("name", GOLDEN)
def test_every_tensor_is_covered(name, shares):
    source, network = opened(golden(name))
    for reference in (False, True):
        plan = plan_split(network, source.tensors, shares, reference=reference)
        check_cover(plan, source)


# Row headers and interleaved rows do not depend on the architecture.
COVERED = [
    pytest.param(
        *(shape, type),
        marks=pytest.mark.full if number > 1 and type not in ("IQ4_K", "Q8_0") else (),
    )
    for number, shape in enumerate(
        (
            "llama-8b",
            "qwen3-30b-a3b",
            "glm-4.5-air",
            "deepseek-v2-lite",
            "qwen3.5-35b-a3b",
            "gemma3-27b",
        )
    )
    for type in ("IQ4_K", "IQ4_KS", "IQ4_K_R4", "Q8_0")
]


@pytest.mark.parametrize("shares", SHARES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("shape, type", COVERED)
def test_quantized_tensors_are_covered(shape, type, shares):
    source, network = opened(f"{shape}:{type}")
    check_cover(plan_split(network, source.tensors, shares), source)


@pytest.mark.parametrize("shares", SHARES, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("name", GOLDEN)
def test_ranks_compute_the_model(name, shares):
    tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"]
    with load_model(golden(name)) as model:
        expected = model.forward(tokens)
        plan = make_plan(model.source, shares)
    first, *others = logits_on_ranks(golden(name), tokens, plan)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
    assert all(torch.equal(first, other) for other in others)

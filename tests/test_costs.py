"""What layers say that they cost: operations, bytes of state and memory, each written out here."""

from __future__ import annotations

import pytest
from iqforge.runtime import memory
from iqforge.runtime.bench.cost import Cost
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.layers.costs import pairs
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.parallel.share import NoMeeting, Share
from iqforge.runtime.split_model import make_plan
from iqforge.runtime.state.cache import CacheSettings

from .shared import shared

F32 = CacheSettings("f32", "f32")


def golden(case: str):
    return load_model(shared(f"golden/convert/{case}/expected-f32.gguf"))


@pytest.mark.parametrize("most", [0, 1, 4, 8, 100])
def test_pairs(most):
    for n_past in range(12):
        for n in range(12):
            seen = [n_past + i + 1 for i in range(n)]
            assert pairs(n_past, n, most) == sum(min(s, most or s) for s in seen)


def test_a_delta_net_costs_the_same_at_every_position():
    with golden("qwen3_5_moe") as model:
        *nets, attention = [block.mixer for block in model.network.blocks]
        state = 4 * (3 * 160 + 6 * 16 * 16)
        for net in nets:
            assert net.read_bytes(0, 5, F32) == net.read_bytes(1000, 5, F32) == 5 * state
            assert net.flop(7, 5) == 5 * 7 * 6 * 16 * 16
            assert net.score_bytes(64, 100, "f32") == net.score_bytes(64, 9000, "f32") > 0
        position = 4 * 2 * 32
        assert attention.read_bytes(10, 2, F32) == position * (11 + 12)
        assert attention.flop(10, 2) == 2 * 2 * (32 + 32) * (11 + 12)
        cost = Cost.of(model, model.new_state(32, F32))
        assert cost.generation_bytes(10, 2) == (
            2 * cost.step_bytes + 3 * 2 * state + position * (11 + 12)
        )
        # The attention is the last layer, which only the last token of a batch needs.
        assert cost.prompt_flop(0, 8, 8) == (
            8 * (cost.token_flop - cost.last_flop)
            + cost.last_flop
            + cost.output_flop
            + 3 * 8 * 7 * 6 * 16 * 16
            + 2 * 2 * (32 + 32) * 8
        )


def test_experts_are_counted_by_the_share_of_their_layer():
    """Four experts of which two are used, blocks of further tokens not counted."""
    with golden("qwen3_5_moe") as model, golden("qwen3_5") as dense:
        shares = [[m.expert_share for m in b.row_layers] for b in model.network.blocks]
        assert shares == [[0.5]] * 4
        assert [m.experts_used for m in model.network.blocks[0].row_layers] == [2]
        assert {m.expert_share for b in dense.network.blocks for m in b.row_layers} == {1.0}
        width, experts, shared_expert = 32, 2 * 3 * 16 * 32, 3 * 16 * 32 + 32
        ffn = experts + shared_expert + 4 * width
        net = (160 + 96 + 6 + 6) * width + 96 * width + 160 * 4
        attention = (128 + 32 + 32 + 64) * width
        assert Cost.of(model).token_flop == 2 * (4 * ffn + 3 * net + attention)


def test_a_part_of_a_model_costs_what_the_whole_does():
    """Also where a rank has no experts of a layer."""
    spec = "gemma4-tiny:IQ4_K"
    plan = make_plan(SyntheticSource(spec), (1, 1), experts="columns")
    with Model(SyntheticSource(spec), "cpu") as model:
        wanted = Cost.of(model, model.new_state(512))
    for rank in range(2):
        share = Share(plan, rank, NoMeeting())
        with Model(SyntheticSource(spec), "cpu", share=share) as model:
            found = Cost.of(model, model.new_state(512))
        assert found.generation_bytes(300, 4) == wanted.generation_bytes(300, 4)
        assert found.prompt_flop(300, 64, 32) == wanted.prompt_flop(300, 64, 32)


def test_one_row_of_every_embedding_is_read():
    with golden("gemma4_e") as model:
        cost = Cost.of(model)
        used = {t.name: t for t in model.source.tensors if model.weights.uses(t.name)}
        table = used["per_layer_token_embd.weight"]  # the other one is the output matrix too
        others = [t for t in used.values() if t is not table]
        assert cost.step_bytes == table.row_bytes + sum(t.n_bytes for t in others)
        assert cost.token_flop == sum(
            2 * t.n_elements for t in others if len(t.shape) > 1 and t.name != "token_embd.weight"
        )


def test_a_window_bounds_what_is_read():
    with golden("gemma3") as model:
        mixers = [block.mixer for block in model.network.blocks]
        assert [mixer.window for mixer in mixers] == [8] * 5 + [0]
        position = 4 * 2 * 32
        assert [m.read_bytes(20, 1, F32) for m in mixers] == [position * 8] * 5 + [position * 21]


def test_layers_without_own_keys_read_those_of_others():
    with golden("gemma4_e") as model:
        mixers = [block.mixer for block in model.network.blocks]
        borrowing = [m for m in mixers if not m.state_bytes(100, F32)]
        assert len(borrowing) == 2 and all(m.read_bytes(5, 1, F32) > 0 for m in borrowing)


def test_latent_attention_reads_one_vector_for_all_heads():
    with golden("deepseek_v2") as model:
        mixer = model.network.blocks[1].mixer
        assert mixer.read_bytes(10, 2, F32) == 4 * (32 + 16) * (11 + 12)
        assert mixer.flop(10, 2) == 2 * 4 * (24 + 16 + 16) * (11 + 12)


def test_sparse_attention_is_bounded_by_its_choice():
    """12 of 31 positions are chosen, by indexers in the first two layers, which look at all."""
    with golden("glm_moe_dsa") as model:
        mixers = [block.mixer for block in model.network.blocks]
        spec, pair = mixers[0].indexer.spec, 2 * 2 * (24 + 8 + 16)
        latent, index, scores = 4 * (32 + 8), 4 * spec.key_length, 2 * spec.heads * spec.key_length
        seen = [mixer.indexer is not None for mixer in mixers]
        assert seen == [True, True, False]
        assert [m.read_bytes(30, 1, F32) for m in mixers] == [
            latent * 12 + index * 31 * looks for looks in seen
        ]
        assert [m.flop(30, 1) for m in mixers] == [
            pair * 12 + scores * 31 * looks for looks in seen
        ]


def test_memory_of_several_sequences():
    """Positions are shared, recurrent states are not."""
    with golden("qwen3_5") as model:
        state, position = 4 * (3 * 160 + 6 * 16 * 16), 4 * 2 * 32
        for n in (1, 3):
            expected = 3 * n * state + 512 * position
            assert model.network.state_bytes(512, F32, 512, n_sequences=n) == expected
        [estimate] = memory.estimate(model.network, model.weights, capacity=512, settings=F32)
        assert estimate.cache == 3 * state + 512 * position
        pool = model.new_pool(512, 3, F32)
        taken = [pool.sequence().nbytes for _ in range(3)]
        assert sum(taken) - 2 * 512 * position == 3 * 3 * state + 512 * position

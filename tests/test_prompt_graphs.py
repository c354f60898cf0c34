"""Graphs of the prompt path without a GPU: a captured pass is repeated by calling its parts again
(prompt_on_cpu.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import iqforge
import pytest
import torch
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs
from iqforge.runtime.cuda.prompt.common.stream import Stream
from iqforge.runtime.cuda.prompt.mixers import latent_absorbed
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.recurrent import RecurrentState
from iqforge.runtime.weights.ranges import recording

from . import prompt_models, prompt_on_cpu
from .prompt_models import TOKENS, memory_of
from .step_graphs_on_cpu import CPU
from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model

latent, opened = prompt_models.latent, prompt_models.opened  # fixtures


# Graphs of passes after other tokens and of those from position 0. (Experts are in none where all
# are decoded first; states of delta nets come and go outside; at position 0
# they only go.)
@pytest.mark.parametrize(
    "spec, later, first",
    [
        ("llama-tiny:Q8_0", 3, 3),
        ("qwen3moe-tiny:Q8_0", 4, 4),
        ("qwen35-tiny:Q8_0", 8, 5),
    ],
)
def test_graphs_repeat_the_captured_passes(monkeypatch, opened, spec, later, first):
    check_graphs(monkeypatch, opened(spec)[0], later, first)


def test_graphs_of_latent_attention_repeat(monkeypatch, latent, opened):
    with load_model(latent[0]) as model:
        check_graphs(monkeypatch, model, 3, 3)


# Keys and values that later layers use, temperatures of queries, positions that an indexer would
# choose, a state-space layer beside attention: graphs after other tokens, from position 0, and
# where nothing is kept. (Experts are in none, nor are heads of 512, which have no flash attention
# here.)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, later, first, alone",
    [
        ("gemma4_e", 8, 6, 4),
        ("mistral4", 4, 4, 2),
        ("glm_moe_dsa", 3, 3, 1),
        ("llama4", 8, 8, 3),
        ("ministral3", 3, 3, 1),
        ("falcon_h1", 7, 5, 1),
        ("mamba2", 9, 5, 1),
        ("kimi_linear", 10, 7, 3),
        ("bailing_hybrid", 9, 7, 3),
    ],
)
def test_graphs_of_families_repeat(monkeypatch, tmp_path, name, later, first, alone):
    file = tmp_path / "f32.gguf"
    iqforge.convert_model(make_tiny_model(CASES[name], WIDE, tmp_path / "hf").folder, file, "f32")
    prompt_on_cpu.install(monkeypatch)
    with load_model(file) as model:
        check_graphs(monkeypatch, model, later, first)
        path = PromptPath(model.network, Context(CPU, torch.float16))
        plain = path.run(TOKENS[:1, :9] % model.n_vocab, 0).clone()
        prompt_on_cpu.captures(monkeypatch)
        for replays in (0, 0, alone):
            before = prompt_on_cpu.Graph.replays
            assert torch.equal(path.run(TOKENS[:1, :9] % model.n_vocab, 0), plain)
            assert prompt_on_cpu.Graph.replays - before == replays


def test_graphs_of_few_rows_know_their_positions(monkeypatch, latent, opened):
    """Where the last row alone is wanted, it attends in the absorbed form, with its position."""

    def to_all(self, q, rows, positions, matrices, out):
        s, (w_k, w_v) = self.m.spec, (x.float() for x in matrices)
        nope, turned = q.float().split([s.nope_length, s.rope_length], -1)
        inner = torch.einsum("nhd,hrd->nhr", nope, w_k)
        scores = torch.cat([turned, inner], -1) @ rows.float().T * s.scale
        later = torch.arange(len(rows)) > positions[:, None]
        shares = scores.masked_fill(later[:, None], float("-inf")).softmax(-1)
        mixed = shares @ rows[:, s.rope_length :].float()
        seen.append(len(q))
        out.copy_(torch.einsum("nhr,hvr->nhv", mixed, w_v).flatten(1))

    seen: list[int] = []
    monkeypatch.setattr(latent_absorbed.AbsorbedRows, "has_kernels", lambda *_: True)
    monkeypatch.setattr(latent_absorbed.AbsorbedRows, "to_all", to_all)
    with load_model(latent[0]) as model:
        heads = model.network.blocks[-1].mixer.spec.heads
        monkeypatch.setattr(latent_absorbed, "FEWEST_KEYS", 1)
        monkeypatch.setattr(latent_absorbed, "KEYS_OF_QUERY", 9 * heads)
        path, plain = (PromptPath(model.network, Context(CPU, torch.float16)) for _ in range(2))
        tokens = TOKENS[:1, :9] % model.n_vocab
        expected = plain.run(tokens, 0, model.new_state(16), last=True)
        assert seen == [1]
        prompt_on_cpu.captures(monkeypatch)
        for _ in range(3):
            assert torch.equal(path.run(tokens, 0, model.new_state(16), last=True), expected)
    assert prompt_on_cpu.Graph.replays == 3


def check_graphs(monkeypatch, model: Model, later: int, first: int) -> None:
    """Passes of one kind at different positions, with others between them and buffers that grow,
    give the bits of a path without graphs, and leave the same in the cache.
    """
    path, plain = (PromptPath(model.network, Context(CPU, torch.float16)) for _ in range(2))
    states, tokens = [model.new_state(64) for _ in range(2)], TOKENS[:1] % model.n_vocab

    def check(first: int, end: int) -> int:
        before = prompt_on_cpu.Graph.replays
        for state in states:
            state.n_past = first
            for layer in state.layers:
                if isinstance(layer, RecurrentState):
                    layer.n_seen = first
        with monkeypatch.context() as patch:
            prompt_on_cpu.captures(patch)
            found = path.run(tokens[:, first:end], first, states[0], last=True).clone()
        assert torch.equal(found, plain.run(tokens[:, first:end], first, states[1], last=True))
        for mine, other in zip(*map(memory_of, states), strict=True):
            assert torch.equal(mine, other)
        return prompt_on_cpu.Graph.replays - before

    # Eager, captured, replayed: after other tokens, and at position 0.
    assert [check(1, 6), check(6, 11), check(11, 16)] == [0, 0, later]
    assert [check(0, 5), check(0, 5), check(0, 5)] == [0, 0, first]
    assert [check(15, 18), check(18, 21), check(3, 6)] == [0, 0, later]
    # Buffers have grown: captured again.
    assert [check(3, 19), check(0, 3), check(3, 6), check(6, 9)] == [0, 0, 0, later]
    assert [check(0, 5), check(0, 5)] == [0, first]
    kept = [(kind.rows, kind.begins) for kind in path._graphs._kept]
    assert kept == [(5, False), (3, False), (5, True)]  # the others came once


def test_graphs_after_experts_read_the_results_of_their_pass(monkeypatch, opened):
    monkeypatch.setitem(SHAPES, "three-layers", replace(SHAPES["qwen3moe-tiny"], n_layers=3))
    model, _, path = opened("three-layers:Q8_0")
    plain = PromptPath(model.network, Context(CPU, torch.float16))
    prompt_on_cpu.captures(monkeypatch)
    for shift in range(3):
        tokens = TOKENS[:1, :9].roll(shift)
        plain._graphs._recent.clear()  # never captures
        assert torch.equal(path.run(tokens, 0), plain.run(tokens, 0))
    assert prompt_on_cpu.Graph.replays > 0


def test_full_passes_are_captured_at_once_and_others_when_they_come_again(monkeypatch, opened):
    monkeypatch.setitem(SHAPES, "four-layers", replace(SHAPES["llama-tiny"], n_layers=4))
    model, _, path = opened("four-layers:Q8_0")  # of 9 tokens are full ones
    plain = PromptPath(model.network, Context(CPU, torch.float16))
    expected = plain.run(TOKENS[:1, :9], 1).clone()
    prompt_on_cpu.captures(monkeypatch)
    for n in (4, 5, 6):
        path.run(TOKENS[:1, :n], 1)
    assert not prompt_on_cpu.Graph.replays
    # Four layers make five segments; in the first pass the buffers of the first one still grow.
    for replays in (0, 4, 9):
        assert (
            torch.equal(path.run(TOKENS[:1, :9], 1), expected)
            and prompt_on_cpu.Graph.replays == replays
        )


def test_passes_from_position_0_are_one_graph(monkeypatch, opened):
    """Where nothing is kept. They are captured when they come again."""
    monkeypatch.setitem(SHAPES, "four-layers", replace(SHAPES["llama-tiny"], n_layers=4))
    model, _, path = opened("four-layers:Q8_0")
    plain = PromptPath(model.network, Context(CPU, torch.float16))
    prompt_on_cpu.captures(monkeypatch)
    for n_sequences in (1, 3):  # of as many rows together
        for replays in (0, 0, 1, 2):
            before = prompt_on_cpu.Graph.replays
            tokens = TOKENS[:1, :9].roll(replays).view(n_sequences, -1)
            plain._graphs._recent.clear()  # never captures
            assert torch.equal(path.run(tokens, 0), plain.run(tokens, 0))
            assert prompt_on_cpu.Graph.replays - before == min(replays, 1)


def test_graphs_hold_no_attention_of_more_rows_than_a_pass_has(monkeypatch, opened):
    _, _, path = opened("llama-tiny:Q8_0")  # of 9 tokens are full ones
    prompt_on_cpu.captures(monkeypatch)
    for n, expected in ((9, 1), (21, 3)):  # of 21 tokens: before and after each attention
        path.run(TOKENS[:1, :n], 0)
        path.run(TOKENS[:1, :n], 0)
        before = prompt_on_cpu.Graph.replays
        path.run(TOKENS[:1, :n], 0)
        assert prompt_on_cpu.Graph.replays - before == expected


def test_the_context_matters_only_where_graphs_rotate_by_it(monkeypatch, opened):
    """And then only by the rotations that it takes."""
    model = opened("llama-tiny:Q8_0")[0]
    rope = model.network.blocks[0].branches[0].module.rope
    monkeypatch.setattr(rope, "long", (100, rope))
    path = PromptPath(model.network, Context(CPU, torch.float16, ubatch=9))
    prompt_on_cpu.captures(monkeypatch)
    for _ in range(2):
        for capacity in (30, 64, 90):
            state = model.new_state(capacity)
            for _ in range(3):
                path.run(TOKENS[:1, :9], state.n_past, state)
                state.n_past += 9
    assert [kind.long for kind in path._graphs._kept] == [(False,), ()]


def rows(path: PromptPath) -> list[int]:
    """Return the numbers of rows that have graphs."""
    return [kind.rows for kind in path._graphs._kept]


def test_sizes_that_come_once_cost_nothing_and_memory_is_given_back_now_and_then(
    monkeypatch, opened
):
    _, _, path = opened("llama-tiny:Q8_0")  # of 9 tokens are full ones
    prompt_on_cpu.captures(monkeypatch)
    monkeypatch.setattr(prompt_graphs, "MOST_KINDS", 2)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(path._graphs._kept)))

    def run(*sizes: int) -> int:
        before = prompt_on_cpu.Graph.replays
        for n in sizes:
            path.run(TOKENS[:1, :n], 1)
        return prompt_on_cpu.Graph.replays - before

    run(21, 9, 9)  # buffers have their sizes
    assert run(9, 2, 3, 4, 5, 6, 7, 8, 9) == 6 and rows(path) == [9] and not emptied
    assert run(8, 8, 9) == 6 and rows(path) == [8, 9]
    run(10, 11, 12, 13, 14, 15, 16, 17, 2, 2)  # of them 2 alone comes again in time: the place of 8
    assert rows(path) == [9, 2] and not emptied
    for number, n in enumerate((3, 4, 5, 6, 7), 2):
        assert run(n, n) == 0 and run(n) == 3
        assert len(emptied) == number // prompt_graphs._FREED_TOGETHER
    assert emptied == [1]  # when the new one fits


def test_prompts_are_profiled_without_their_graphs(monkeypatch, opened):
    model, context = opened("llama-tiny:Q8_0")[:2]
    engine = model.__dict__["engine"] = Engine(model.network, context)
    prompt_on_cpu.captures(monkeypatch)

    def replays() -> int:
        before = prompt_on_cpu.Graph.replays
        for _ in range(3):
            engine.hidden(TOKENS[:1, :9])
        return prompt_on_cpu.Graph.replays - before

    assert replays() == 1 and replays() == 3
    with recording():
        assert not replays()
    assert replays() == 3


def test_the_error_of_a_failed_capture_is_raised(monkeypatch):
    """The error of the pass is raised, not that of the void capture. If only the capture failed,
    that is raised.
    """
    ended = []

    class Graph:
        def capture_begin(self, **options):
            pass

        def capture_end(self):
            ended.append(self)
            raise RuntimeError("the capture is void")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("CUDAGraph", Graph),
        ("current_stream", lambda: stream),
        ("stream", lambda stream: nullcontext()),
        ("graph_pool_handle", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    context = Context(CPU)
    graphs, rows = prompt_graphs.PassGraphs(context, stream), Stream(torch.zeros(2, 8), context)

    def fails(stream, batch):
        raise MemoryError("no memory for the product")

    with pytest.raises(MemoryError, match="no memory"):
        graphs._capture([(0, fails)], rows, Batch.of(1, 2, 0, CPU))
    assert len(ended) == 1
    with pytest.raises(RuntimeError, match="void"):
        graphs._capture([], rows, None)
    assert len(ended) == 2 and not graphs.has_graphs

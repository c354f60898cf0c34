"""The prompt path's executors without a GPU: kernels are plain torch (prompt_on_cpu.py), all other
code is real.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import iqforge
import pytest
import torch
from iqforge.cuda_kernels.prompt import rounded as prompt_rounded
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda import planned
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import Slow
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.cuda.prompt.common import rounded
from iqforge.runtime.cuda.prompt.common import weights as prompt_weights
from iqforge.runtime.cuda.prompt.mixers import attention as prompt_attention
from iqforge.runtime.cuda.prompt.mixers import mla as prompt_mla
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.layers import attention
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.cache import CacheSettings, KVStorage
from iqforge.runtime.state.cache_tiles import RowLayout
from iqforge.runtime.state.sequence import State
from iqforge.runtime.weights.ranges import RangeName, recording
from iqforge.runtime.weights.switches import Switches

from . import prompt_models, prompt_on_cpu, step_on_cpu
from .choices import by_token, comparable, recorded
from .prompt_models import PRECISION, TOKENS, memory_of, normed
from .step_graphs_on_cpu import CPU, Graph
from .tiny_cases import CASES, FAST, WIDE
from .tiny_models import HALF, make_tiny_model

latent, opened = prompt_models.latent, prompt_models.opened  # fixtures


@pytest.mark.parametrize(
    "settings",
    [None, CacheSettings("q8_0", "q8_0", True, True), CacheSettings("bf16", "bf16")],
    ids=lambda s: s and s.type_k,
)
@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0"])
def test_last_rows_are_those_of_all(monkeypatch, opened, spec, settings):
    """Logits, keys and values are the same for new sequences and for pieces of a kept one."""
    model, context, path = opened(spec, settings)
    assert not context.slow or spec.startswith("qwen3")  # experts are decoded first
    with recorded(monkeypatch) as found:
        every = path.run(TOKENS, 5).clone()
    with recorded(monkeypatch) as wanted:
        expected = model.hidden(TOKENS, 5)
    last = path.run(TOKENS, 5, last=True).clone()
    assert last.shape == (3, 256) and every.shape == (63, 256)
    torch.testing.assert_close(
        normed(model, last), normed(model, every.view(3, 21, -1)[:, -1]), **PRECISION
    )
    mine, theirs = (
        [x.unflatten(0, (3, 21)) for x in by_token(one, [63])] for one in (found, wanted)
    )
    same = torch.stack(
        [comparable([x[i] for x in mine], [x[i] for x in theirs], 21) for i in range(3)]
    )
    assert same.sum() > 0.9 * same.numel()
    torch.testing.assert_close(
        normed(model, every).view(3, 21, -1)[same], expected[same], rtol=0.1, atol=0.1
    )

    states = [model.new_state(64, settings or CacheSettings()) for _ in range(2)]
    for first, end in ((0, 13), (13, 14), (14, 21)):  # in pieces, one of them of one row
        rows = [
            path.run(TOKENS[:1, first:end], first, state, last=last).clone()
            for state, last in zip(states, (False, True), strict=True)
        ]
        assert rows[1].shape == (1, 256)
        torch.testing.assert_close(normed(model, rows[1]), normed(model, rows[0][-1:]), **PRECISION)
    for one, other in zip(*(state.layers for state in states), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.read(21), other.read(21), strict=True))


class _InTiles(KVStorage):
    """Memory as it is on a GPU."""

    def __init__(self, *words):
        super().__init__(*words, layout=RowLayout.TILES)


@pytest.mark.parametrize(
    "settings",
    [CacheSettings("q8_0", "q4_0"), CacheSettings("q8_kv", "q5_1", True, True)],
    ids=lambda s: s.type_k,
)
def test_a_quantized_cache_that_kernels_read(monkeypatch, opened, settings):
    """Passes give what they give with blocks, and repeat graphs while the cache fills."""
    prompt_on_cpu.captures(monkeypatch)
    tokens, found = TOKENS.reshape(1, -1)[:, :54], []
    for storage in (KVStorage, _InTiles):
        monkeypatch.setattr(attention, "KVStorage", storage)
        model, _, path = opened("llama-tiny:Q8_0", settings)
        state, rows, replays = model.new_state(64, settings), [], []
        for first in range(0, 54, 9):
            before = prompt_on_cpu.Graph.replays
            rows.append(path.run(tokens[:, first : first + 9], first, state).clone())
            replays.append(prompt_on_cpu.Graph.replays - before)
            state.advance(9)
        assert len(set(replays[2:])) == 1 and replays[2] > 0
        found.append(torch.cat(rows))
        tiled = state.layers[0].storage.layout is RowLayout.TILES
        assert tiled == (storage is _InTiles)
    assert torch.equal(*found)


@pytest.mark.parametrize("slice_bytes", [prompt_weights.SLICE_BYTES, 96 * 256 * 2])
def test_a_vocabulary_that_is_no_multiple_of_8(monkeypatch, opened, slice_bytes):
    """Embedding and output are in kernels, in one slice of the output and in several."""
    monkeypatch.setattr(prompt_weights, "SLICE_BYTES", slice_bytes)
    monkeypatch.setitem(SHAPES, "odd", replace(SHAPES["llama-tiny"], n_vocab=509))
    model, context, path = opened("odd:Q8_0")
    assert not context.slow
    tokens = TOKENS[:1] % 509
    logits = path.logits(model.network.output_norm(path.run(tokens, 0)))
    expected = model.forward(tokens[0])
    assert logits.shape == expected.shape == (21, 509)
    assert (logits - expected).abs().max() < 0.03 * expected.std()


@pytest.mark.parametrize("value_head", [32, 96])
@pytest.mark.parametrize("settings", [None, CacheSettings("q8_0", "q8_0")], ids=["f16", "q8_0"])
def test_values_of_another_length(monkeypatch, opened, value_head, settings):
    """Prompts of new sequences, and pieces of a kept one, without a slow layer."""
    shape = replace(SHAPES["llama-tiny"], value_head=value_head)
    monkeypatch.setitem(SHAPES, "other-values", shape)
    model, context, path = opened("other-values:Q8_0", settings)
    every = path.run(TOKENS, 5).clone()
    close = {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(
        normed(model, every).view(3, 21, -1), model.hidden(TOKENS, 5), **close
    )
    state, pieces = model.new_state(64, settings or CacheSettings()), []
    for first, end in ((0, 13), (13, 14), (14, 21)):
        pieces.append(path.run(TOKENS[:1, first:end], first, state).clone())
        state.advance(end - first)
    torch.testing.assert_close(
        normed(model, torch.cat(pieces)), model.hidden(TOKENS[:1])[0], **close
    )
    assert not context.slow


def test_the_last_layer_works_on_last_rows_alone(monkeypatch, opened):
    _, _, path = opened("llama-tiny:Q8_0")
    seen, real = [], prompt_weights.Product.__call__

    def product(self, x):
        seen.append((len(x), self.rows))
        return real(self, x)

    monkeypatch.setattr(prompt_weights.Product, "__call__", product)
    path.run(TOKENS, 0)
    whole = [(63, 512), (63, 256), (63, 1024), (63, 256)]  # q, k and v; output; gate and up; down
    assert seen == 2 * whole
    seen.clear()
    path.run(TOKENS, 0, last=True)
    # Keys and values of all, the rest of 3.
    assert seen == [
        *whole,
        (63, 256),
        (3, 256),
        (3, 256),
        (3, 1024),
        (3, 256),
    ]


@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen3moe-tiny:Q8_0"])
def test_a_closed_model_gives_its_memory_back_at_once(monkeypatch, opened, spec):
    """It does not wait for the garbage collector, and the driver gets the memory back."""
    model, context = opened(spec)[:2]
    left = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: left.append(sum(held() is not None for held in weights))
    )
    prompt_on_cpu.captures(monkeypatch)
    gc.disable()
    try:
        engine = model.__dict__["engine"] = Engine(model.network, context)
        state = model.new_state(64)
        for tokens in [TOKENS[0, :9]] * 3 + [TOKENS[0, :1]] * 2:  # graphs of prompts and of steps
            engine.extend(tokens, state)
        weights = [weakref.ref(resident.packed.data) for resident in model.weights.store.resident]
        assert weights and prompt_on_cpu.Graph.replays and Graph.alive
        del engine
        model.device = torch.device("cuda")  # what `close` goes by
        model.close()
        assert left == [0] and not Graph.alive
    finally:
        gc.enable()


def test_a_closed_model_on_the_cpu_leaves_gpus_alone(monkeypatch):
    device = step_on_cpu.install(monkeypatch)
    Model(SyntheticSource("llama-tiny:Q8_0"), CPU).close()
    assert not device.emptied


def test_layers_that_the_path_has_no_kernels_for(opened):
    """They ignore the request for last rows, so their result is cut."""
    model, context, path = opened("llama-tiny:Q8_0", switches=Switches(flash_attention=False))
    assert context.slow
    every, last = (path.run(TOKENS, 0, last=last).clone() for last in (False, True))
    torch.testing.assert_close(
        normed(model, last), normed(model, every.view(3, 21, -1)[:, -1]), **PRECISION
    )


def test_logits_after_a_prompt_are_the_last_of_all(opened):
    model, context, _ = opened("llama-tiny:Q8_0")
    engine, states = Engine(model.network, context), [model.new_state(64) for _ in range(2)]
    every, last = (
        engine.extend(TOKENS[0], state, all_logits)
        for state, all_logits in zip(states, (True, False), strict=True)
    )
    assert [state.n_past for state in states] == [21, 21]
    torch.testing.assert_close(last, every[-1], **PRECISION)


def test_many_keys_and_values_go_straight_to_the_cache(monkeypatch, opened):
    """A pass reads its own keys and values from buffers only where few have to be copied."""
    model, copied = opened("llama-tiny:Q8_0")[0], []
    executor = prompt_attention.PromptAttention
    store = executor._store
    monkeypatch.setattr(executor, "_store", lambda *args: (copied.append(args[0]), store(*args)))

    def run(n_bytes: int):
        monkeypatch.setattr(prompt_attention, "OWN_BYTES", n_bytes)
        state = model.new_state(64)
        path = PromptPath(model.network, Context(CPU, torch.float16))
        return path.run(TOKENS[:1, :8] % model.n_vocab, 0, state, last=True).clone(), state

    (found, state), n_copied = run(prompt_attention.OWN_BYTES), len(copied)
    (straight, other), n_more = run(0), len(copied) - n_copied
    assert n_copied == len(model.network.layers) and n_more == 0
    torch.testing.assert_close(found, straight, **PRECISION)
    for mine, theirs in zip(memory_of(state), memory_of(other), strict=True):
        assert torch.equal(mine, theirs)


def test_executors_are_asked_for_their_stages_once_for_a_kind(monkeypatch, opened):
    """The device waits for that. A cache in pieces, or another type of it, is another kind."""
    model, asked = opened("llama-tiny:Q8_0")[0], []
    executor = prompt_attention.PromptAttention
    stages = executor.stages
    monkeypatch.setattr(executor, "stages", lambda *args: (asked.append(args[0]), stages(*args))[1])
    path = PromptPath(model.network, Context(CPU, torch.float16))

    def asks(n_tokens: int, first: int, state: State) -> bool:
        asked.clear()
        path.run(TOKENS[:1, :n_tokens] % model.n_vocab, first, state, last=True)
        return len(asked) > 1  # the last one runs apart

    state, quantized = model.new_state(64), model.new_state(64, CacheSettings("q8_0", "q8_0"))
    scattered = model.new_pool(64, 1).sequence()
    scattered.reserve(8)
    assert [asks(8, 0, state), asks(8, 0, state), asks(7, 0, state)] == [True, False, True]
    assert [asks(8, 0, quantized), asks(8, 0, scattered)] == [True, True]
    assert [asks(8, 0, quantized), asks(8, 0, scattered)] == [False, False]


@pytest.mark.parametrize(
    ("spec", "most"),
    [("llama-tiny:Q8_0", 0.05), ("qwen3moe-tiny:Q8_0", 0.05), ("qwen35-tiny:Q8_0", 0.05)],
)
def test_dense_products_in_8_bits(monkeypatch, opened, spec, most):
    """Prompts of --precision int8 are near those of half precision, also in pieces of weights."""
    model, _, path = opened(spec)
    rounds = Context(CPU, torch.float16, ubatch=64, rounds=True)
    monkeypatch.setattr(prompt_rounded, "FEWEST_ROWS", 20)
    monkeypatch.setattr(rounded, "ROWS", 160)
    seen = []
    multiply = torch.ops.aten._int_mm

    def multiplied(a, b, *, out):
        seen.append(b.shape)
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch.ops.aten, "_int_mm", multiplied)
    expected = normed(model, path.run(TOKENS[:1], 0).clone()).double()
    assert not seen
    found = normed(model, PromptPath(model.network, rounds).run(TOKENS[:1], 0)).double()
    assert seen and max(shape[1] for shape in seen) == 160
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < most
    announced = rounded.buffer_bytes(21, [(p.rows, p.cols) for p in model.weights.parameters])
    names = ("rounded rows", "scales of rows", "rounded weights", "scales of weights")
    assert announced >= sum(rounds._buffers[n].numel() for n in (*names, "sums of bytes"))


@pytest.mark.parametrize("cache", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen35-tiny:Q8_0"])
def test_buffers_of_kept_prompts_are_announced(opened, spec, cache):
    settings = CacheSettings(cache, cache)
    model, context, path = opened(spec)
    path.run(TOKENS[:1, :9], 0, model.new_state(64, settings))
    sizes: dict[str, int] = {}
    for branch in (branch for block in model.network.blocks for branch in block.branches):
        found = planned._of_branch(branch, model.network.width, 9, 9, settings, CPU)
        sizes |= {name: max(n, sizes.get(name, 0)) for name, n in found.items()}
    held = {name: x.numel() for name, x in context._buffers.items()}
    of_cache = {"keys", "values"} if cache == "f16" else set()
    assert {"queries"} | of_cache <= held.keys() & sizes.keys()
    unknown = held.keys() - sizes.keys() - {"stream", "normed"}
    assert all(name.startswith("delta ") for name in unknown)  # delta nets announce sums of theirs
    assert all(n <= sizes[name] for name, n in held.items() if name in sizes)


@pytest.mark.slow
def test_latent_vectors_are_announced_where_positions_are_chosen(monkeypatch, tmp_path):
    """Passes that see all positions read their own latent vectors."""
    tiny, file = make_tiny_model(CASES["glm_moe_dsa"], WIDE, tmp_path / "hf"), tmp_path / "f32.gguf"
    iqforge.convert_model(tiny.folder, file, "f32")
    prompt_on_cpu.install(monkeypatch)
    settings = CacheSettings("f16", "f16")
    with load_model(file) as model:
        context = Context(CPU, torch.float16, ubatch=9)
        path = PromptPath(model.network, context)
        path.run(TOKENS[:1, :9] % model.n_vocab, 0, model.new_state(64, settings))
        for block in model.network.blocks:
            found = planned._of_branch(block.branches[0], model.network.width, 9, 64, settings, CPU)
            assert found["latents"] == context._buffers["latents"].numel()
            assert found["attention in graphs"] == found["attention"]
            more = planned._of_branch(block.branches[0], model.network.width, 99, 99, settings, CPU)
            assert more["latents"] == found["latents"] // 9 * block.mixer.top_k


def test_a_profiled_prompt_names_its_layers(opened):
    """One range for each executor, whatever the stages it consists of."""
    model, _, path = opened("qwen3moe-tiny:Q8_0")
    path.run(TOKENS, 0)
    with recording(), torch.profiler.profile(acc_events=True) as recorded:
        h = path.run(TOKENS, 0)
        path.logits(normed(model, h))
        path.next_logits(h)
    names = [event.name for event in recorded.events()]
    for layer in range(2):
        for kind in ("Attention", "MoE"):
            assert names.count(str(RangeName(f"blk.{layer}", kind))) == 1
    assert {str(RangeName(x, x)) for x in ("token_embd", "output")} <= set(names)
    head = path._output.matrix.nbytes
    assert str(RangeName("", "norm_matvec", head)) in names
    router = model.network.blocks[1].branches[1].module.router.linear
    assert str(RangeName("blk.1", "ffn_gate_inp", router.matrix.stored_bytes)) in names


@pytest.fixture(scope="module", params=FAST)
def fast(request, tmp_path_factory):
    """(f32 file, token ids) of a random model, made before anything is replaced."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny = make_tiny_model(CASES[request.param], WIDE, folder / "hf", HALF)
    iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32")
    return folder / "f32.gguf", tiny.tokens


def check_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows in half precision with float32."""
    off = (found - expected).abs().amax(1) / expected.abs().max()
    assert off.max() < 0.05, off


def test_other_architectures(fast, opened):
    """Windows, biases, shared experts, other routers, norms after a branch: for new sequences, for
    pieces of a kept one, and for last rows alone.
    """
    file, ids = fast
    with load_model(file, switches=Switches(swa_full=True)) as model:
        context = Context(CPU, torch.float16, None, ubatch=64)
        path = PromptPath(model.network, context)
        # Of experts: that this device decodes them first.
        assert {kind for kind, *_ in context.slow} <= {"MoE"}
        assert all("decoded" in why or "one after" in why for _, why, _ in context.slow)
        tokens = torch.tensor(ids)[None]
        expected = model.hidden(tokens)[0]
        every = normed(model, path.run(tokens, 0)).clone()
        check_near(every, expected)
        last = path.run(tokens, 0, last=True)
        torch.testing.assert_close(normed(model, last), every[-1:], **PRECISION)
        state, rows = model.new_state(64, CacheSettings()), []
        for first, end in ((0, 13), (13, 14), (14, 40)):
            state.reserve(end - first)
            rows.append(normed(model, path.run(tokens[:, first:end], first, state)).clone())
            state.advance(end - first)
        check_near(torch.cat(rows), expected)


def test_graphs_of_other_architectures(monkeypatch, fast, opened):
    """Replays work on the tokens of their pass."""
    file, ids = fast
    prompt_on_cpu.captures(monkeypatch)
    with load_model(file, switches=Switches(swa_full=True)) as model:
        plain, captured = (
            PromptPath(model.network, Context(CPU, torch.float16, None, ubatch=n))
            for n in (2 * len(ids), len(ids))
        )
        for shift in range(3):
            tokens = torch.tensor(ids).roll(shift)[None]
            plain._graphs._recent.clear()  # never captures
            expected = normed(model, plain.run(tokens, 0)).clone()
            found = normed(model, captured.run(tokens, 0))
            torch.testing.assert_close(found, expected, **PRECISION)
    assert prompt_on_cpu.Graph.replays > 0


@pytest.mark.parametrize(
    "settings",
    [CacheSettings("bf16"), CacheSettings("q8_0", hadamard_k=True), CacheSettings("f32")],
    ids=lambda s: s.type_k,
)
def test_latent_attention_with_other_caches(monkeypatch, latent, opened, settings):
    """For new sequences and pieces of a kept one; also with keys and values of one head at a
    time.
    """
    file, ids = latent
    tokens = torch.tensor(ids)[None]
    with load_model(file, cache=settings) as model:
        path = PromptPath(model.network, context := Context(CPU, torch.float16, settings))
        assert not context.slow
        expected = model.hidden(tokens)[0]
        found = normed(model, path.run(tokens, 0)).clone()
        check_near(found, expected)
        state, rows = model.new_state(64, settings), []
        for first, end in ((0, 13), (13, 14), (14, 40)):
            state.reserve(end - first)
            rows.append(normed(model, path.run(tokens[:, first:end], first, state)).clone())
            state.advance(end - first)
        check_near(torch.cat(rows), expected)
        monkeypatch.setattr(prompt_mla, "BUFFER_BYTES", 1)
        torch.testing.assert_close(normed(model, path.run(tokens, 0)), found, **PRECISION)


def test_a_product_of_any_number_of_rows(monkeypatch, tmp_path):
    """As of gates on a rank whose heads are no multiple of 8."""
    usual = CASES["step35"].config(WIDE)
    near = usual["attention_other_setting"] | {"num_attention_heads": 20}
    heads = {"num_attention_heads": 12, "attention_other_setting": near}
    case = replace(CASES["step35"], config=lambda _: usual | heads)
    tiny = make_tiny_model(case, WIDE, tmp_path / "hf")
    path = iqforge.convert_model(tiny.folder, tmp_path / "m.gguf", "bf16")
    prompt_on_cpu.install(monkeypatch)
    with load_model(path) as model:
        context = Context(CPU)
        gates = [block.branches[0].module.gate for block in model.network.blocks]
        assert [gate.rows for gate in gates] == [12, 20, 12]
        for gate in gates:
            product = prompt_weights.Product("gates", [gate], context, uneven=True)
            x = torch.randn(5, gate.cols).to(context.dtype)
            out = product(x)
            assert out.shape == product.out(5).shape == (5, -(-gate.rows // 8) * 8)
            expected = x.float() @ gate.decoded().float().T
            torch.testing.assert_close(out[:, : gate.rows].float(), expected, rtol=1e-2, atol=2e-2)
        with pytest.raises(Slow, match="attn_gate is 12 x 256, not multiples of 8"):
            prompt_weights.Product("gates", gates[:1], context)
        with pytest.raises(Slow, match="24 rows of several matrices"):
            prompt_weights.Product("gates", gates[::2], context, uneven=True)

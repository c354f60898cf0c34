"""The decode step's executors and graphs without a GPU: kernels are plain torch (step_on_cpu.py),
all other code is real.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import UsageError
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import Slow
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step import graphs as step_graphs
from iqforge.runtime.cuda.step.attention import StepAttentionLayer
from iqforge.runtime.cuda.step.ends import SlowOutput
from iqforge.runtime.cuda.step.moe import StepMoE
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.layers.ffn import GatedFFN
from iqforge.runtime.layers.moe import MoE
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.specs import FFNSpec
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.network import Network
from iqforge.runtime.network.sampling import GREEDY, Sampling
from iqforge.runtime.state.cache import CacheSettings, KVCache, KVStorage
from iqforge.runtime.state.recurrent import RecurrentState
from iqforge.runtime.state.table import Blocks, Table
from iqforge.runtime.weights import linear
from iqforge.runtime.weights.ranges import PREFIX, RangeName, recording
from iqforge.runtime.weights.switches import Switches

from . import step_on_cpu
from .step_graphs_on_cpu import CPU, Graph
from .step_on_cpu import in_pieces
from .tiny_cases import CASES, FAST, WIDE
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf
from .tiny_models import make_tiny_model

TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 14).tolist()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama")
    make_tiny_qwen3moe(folder / "moe", tied=True, n_heads=4, n_kv_heads=1)
    return folder


@pytest.fixture
def opened(checkpoints):
    """Return opened(name, type of a tensor or of all, settings), which returns (model, its step
    path, the messages of --verbose).
    """
    models, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # products are small: threads would only wait for each other

    def make(
        name: str, type="Q8_0", settings: CacheSettings | None = None
    ) -> tuple[Model, StepPath, list[str]]:
        choose = type if callable(type) else lambda tensor: type
        path = checkpoints / f"{name}-{len(list(checkpoints.iterdir()))}.gguf"
        with CheckpointSource(open_checkpoint(checkpoints / name)) as source:
            write_gguf(
                path,
                source,
                lambda t: choose(t) if len(t.shape) > 1 and "ffn_gate_inp" not in t.name else "F32",
            )
        model = load_model(path)
        models.append(model)
        told: list[str] = []
        steps = StepPath(
            model.network, context := Context(CPU, settings=settings, verbose=told.append)
        )
        context.report_all()
        return model, steps, told

    yield make
    torch.set_num_threads(threads)
    for model in models:
        model.close()


def stepped(
    model: Model, steps: StepPath, settings: CacheSettings = CacheSettings(), sizes=(1,)
) -> torch.Tensor:
    """Return the logits of all TOKENS, appended in pieces of these sizes (the last size
    repeats).
    """
    state, rows, at = model.new_state(300, settings), [], 0
    while at < len(TOKENS):
        n = sizes[min(len(rows), len(sizes) - 1)]
        rows.append(steps.extend(torch.tensor(TOKENS[at : at + n]), state, all_logits=True))
        at += n
    return torch.cat(rows)


def check(
    model: Model, steps: StepPath, settings: CacheSettings = CacheSettings(), **options
) -> None:
    truth = model.extend(TOKENS, model.new_state(300, settings), all_logits=True)
    torch.testing.assert_close(
        stepped(model, steps, settings, **options), truth, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_steps_are_the_reference_path(monkeypatch, opened, name):
    step_on_cpu.install(monkeypatch)
    model, steps, told = opened(name)
    assert steps.captures and not told
    check(model, steps)
    assert Graph.replays > 10
    check(model, steps, sizes=(7, 3, 1))


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_profiled_step_names_layers_and_operations(monkeypatch, opened, name):
    step_on_cpu.install(monkeypatch)
    model, steps, _ = opened(name)
    state = model.new_state(300)
    with recording(), torch.profiler.profile(acc_events=True) as recorded:
        steps.extend(torch.tensor(TOKENS[:1]), state)
    names = [event.name for event in recorded.events() if event.name.startswith(PREFIX)]
    kinds = [type(branch.branch.module).__name__ for branch in steps._branches]
    layers = [str(RangeName(f"blk.{i // 2}", kind)) for i, kind in enumerate(kinds)]
    assert [x for x in names if x in layers] == layers
    assert names[0] == str(RangeName("token_embd", "token_embd"))
    first, second = steps._branches[:2]
    expected = [RangeName("", "norm_matvec", sum(m.nbytes for m in first.qkv))]
    expected += [RangeName("", "matvec_add", first.output.matrix.nbytes)]
    if name == "llama":
        expected += [RangeName("", "gate_up", sum(m.nbytes for m in second.matrices))]
        expected += [RangeName("", "matvec_add", second.down.matrix.nbytes)]
    else:  # of the experts as many as are used
        share = second.spec.n_used / second.spec.n_experts
        expected += [
            RangeName("", "expert_gate_up", share * (second.gate.nbytes + second.up.nbytes)),
            RangeName("", "expert_down_add", share * second.down.nbytes),
        ]
    operations = [x for x in names if x.startswith(f"{PREFIX}|")]
    assert operations[:4] == [str(x) for x in expected]
    assert operations[-1].startswith(f"{PREFIX}|norm_matvec|")
    assert names[-2:] == [str(RangeName("output", "output")), operations[-1]]


def test_following_tokens_are_the_reference_paths(monkeypatch, opened):
    step_on_cpu.install(monkeypatch)
    model, steps, _ = opened("llama")
    expected = list(model.follow(5, model.new_state(100), 20, GREEDY))
    assert list(steps.follow(5, model.new_state(100), 20, GREEDY)) == expected
    assert Graph.replays > 10


@pytest.mark.parametrize(
    "settings, low, high",
    [
        (CacheSettings(), 0.01, 0.03),
        (CacheSettings("bf16", "f32"), 0.01, 0.03),
        (CacheSettings("q8_0", "q5_1", True, True), 0.04, 0.07),
    ],
)
def test_what_rounding_costs(monkeypatch, opened, settings, low, high):
    """The bounds of test_step_path_cuda.py come from here: activations have 8 bits, as in a step's
    products, and everything else is exact.
    """
    step_on_cpu.install(monkeypatch)
    model, _, _ = opened("llama", "IQ4_K")
    tokens = [0, *np.random.default_rng(1).integers(2, 300, 56).tolist()]
    monkeypatch.setitem(vars(model), "_steps", None)  # layer by layer
    truth = model.extend(tokens, model.new_state(100, settings), all_logits=True)
    product = linear.proven_product

    def rounded(matrix, x):
        x = x.view(len(x), -1, 32)
        largest = x.abs().amax(-1, keepdim=True)
        return product(matrix, (torch.round(x * (127 / largest)) * (largest / 127)).flatten(1))

    monkeypatch.setattr(linear, "proven_product", rounded)
    state = model.new_state(100, settings)
    steps = torch.stack([model.extend([token], state) for token in tokens])
    error = ((steps - truth).norm(dim=-1) / truth.norm(dim=-1)).median()
    assert low < error < high


@pytest.mark.parametrize("type", ["BF16", "F16"])
def test_experts_of_floats(monkeypatch, opened, type):
    step_on_cpu.install(monkeypatch)
    model, steps, told = opened("moe", type)
    assert not told and steps.captures
    check(model, steps)
    assert list(steps.follow(5, model.new_state(30), 9, GREEDY)) == list(
        model.follow(5, model.new_state(30), 9, GREEDY)
    )


def test_experts_of_two_types(monkeypatch, opened):
    step_on_cpu.install(monkeypatch)
    model, steps, told = opened("moe", lambda t: "Q5_0" if "ffn_up_exps" in t.name else "Q8_0")
    assert not told and steps.captures
    check(model, steps)


def test_heads_too_large_for_shared_memory_are_named_when_the_executor_is_made(monkeypatch, opened):
    step_on_cpu.install(monkeypatch, attention=11000)
    model, steps, told = opened("llama")
    assert len(told) == 1 and not steps.captures
    assert told[0].startswith(
        "slow path: Attention of 2 layers from 0: 2 heads of 64 elements to a head of keys, and a"
        " cache of f16"
    )
    check(model, steps)


def test_a_sequence_whose_cache_does_not_fit_is_named_when_it_begins(monkeypatch, opened):
    step_on_cpu.install(monkeypatch, attention=13550)
    model, steps, told = opened("llama")
    assert steps.captures and not told
    check(model, steps, CacheSettings("f32", "f32"))  # whose rows take twice as much
    assert len(told) == 1 and "a cache of f32" in told[0] and not Graph.replays
    check(model, steps)  # others as ever
    assert len(told) == 1 and Graph.replays


def test_rows_too_long_for_shared_memory_are_named(monkeypatch, opened):
    step_on_cpu.install(monkeypatch, products=6000)
    model, steps, told = opened("llama")  # a warp reads two rows at once; there are two at least
    assert told == [
        "slow path: GatedFFN of 2 layers from 0: ffn_gate has rows of 256 elements, too many for"
        " the shared memory of cpu"
    ]
    check(model, steps)


def test_logits_are_where_the_final_norm_is(monkeypatch, opened):
    """This holds for steps and prompts, with only the output on the CPU, and with everything but
    the output on the CPU. "meta" is the other device.
    """
    step_on_cpu.install(monkeypatch)
    model, _, _ = opened("llama")
    elsewhere = replace(
        model.network, output_norm=RMSNorm(model.network.output_norm.weight.to("meta"), 1e-5)
    )
    steps, prompt, state = (
        StepPath(elsewhere, Context(CPU)),
        PromptPath(elsewhere, Context(CPU)),
        model.new_state(100),
    )
    assert isinstance(steps._launches.ending, SlowOutput)
    steps._launches.ending = lambda frame, rows: frame.logits[
        : rows.stop - rows.start
    ].zero_()  # what it leaves is on the device of the step
    for all_logits, shape in ((True, [3, model.n_vocab]), (False, [model.n_vocab])):
        logits = steps.extend(torch.tensor([5, 6, 7]), state, all_logits)
        assert (
            logits.device == elsewhere.output_device == torch.device("meta")
            and list(logits.shape) == shape
        )
    # A matrix on the device of the prompt.
    prompt._output = lambda x: torch.zeros(len(x), model.n_vocab)
    assert prompt.logits(torch.zeros(2, 256)).device == elsewhere.output_device
    assert model.logits(torch.zeros(2, 256)).device == model.network.output_device == CPU


def test_graphs_and_scratch_go_with_their_sequence(monkeypatch, opened):
    """However many sequences there were, and of whatever capacities, only the memory of living ones
    is kept.
    """
    device = step_on_cpu.install(monkeypatch)
    model, steps, _ = opened("llama")
    most = 0
    for i in range(20):
        state = model.new_state(256 * (1 + i % 7))
        for _ in range(3):
            steps.extend(torch.tensor([5]), state)
        assert len(Graph.alive) == len(steps._sequences) == 1
        most = max(most, len(steps.frame._sized))
    assert most == 1
    assert device.emptied == 1  # what graphs had allocated is given back now and then
    kept = [model.new_state(256) for _ in range(2)]
    for state in kept:
        steps.extend(torch.tensor([5]), state)
    del state
    # They share buffers of the same size.
    assert len(steps._sequences) == 2 and len(steps.frame._sized) == 1
    kept.clear()
    assert not steps._sequences and not Graph.alive and not steps.frame._sized


def test_graphs_of_one_sequence_are_bounded(monkeypatch, opened):
    step_on_cpu.install(monkeypatch)
    model, steps, _ = opened("llama")
    state = model.new_state(256)
    for i in range(step_graphs.MOST_GRAPHS + 5):
        sampling = Sampling(temperature=0.5 + i / 100)
        state.clear()
        list(steps.follow(5, state, 4, sampling))
        assert len(Graph.alive) == min(i + 1, step_graphs.MOST_GRAPHS)


def test_a_closed_model_holds_no_weights(monkeypatch, opened):
    step_on_cpu.install(monkeypatch)
    model, steps, _ = opened("llama")
    model.__dict__["engine"] = SimpleNamespace(steps=steps, close=lambda: None)
    model.load()
    held = model.weights.store.resident
    assert all(resident.is_loaded for resident in held)
    model.close()
    assert not any(resident.is_loaded for resident in held) and "engine" not in model.__dict__


BIASED = replace(
    CASES["llama"],
    name="llama_biased",
    config=lambda s: CASES["llama"].config(s) | {"attention_bias": True, "mlp_bias": True},
)


EVERY = [*(CASES[name] for name in FAST), BIASED]
FLOATS = [
    pytest.param(case, "BF16", marks=[] if case.name == "gemma4_moe" else [pytest.mark.full])
    for case in EVERY
]


@pytest.mark.parametrize(
    "case, type",
    [*((case, "Q8_0") for case in EVERY), *FLOATS],
    ids=lambda x: getattr(x, "name", x),
)
def test_other_architectures(monkeypatch, tmp_path, case, type):
    """Windows, biases, shared experts, other routers, norms after a branch: all in kernels."""
    tiny = make_tiny_model(case, WIDE, tmp_path / case.name)
    path = tmp_path / f"{case.name}.gguf"
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    iqforge.quantize_model(tmp_path / "f32.gguf", path, Recipe(type, pure=True))
    step_on_cpu.install(monkeypatch)
    with load_model(path, switches=Switches(swa_full=True)) as model:
        told: list[str] = []
        steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
        context.report_all()
        assert not told and steps.captures
        settings = CacheSettings("f32", "f32")
        tokens = torch.tensor(tiny.tokens)
        expected = model.extend(tokens, model.new_state(64, settings), all_logits=True)
        found = in_pieces(steps, tokens, model.new_state(64, settings))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("other", [None, "ffn_down_shexp", "ffn_up_shexp"])
def test_a_shared_expert_is_in_the_launches_of_the_others(monkeypatch, tmp_path, case, other):
    """As far as its matrices have the same types."""
    tiny, path = make_tiny_model(CASES[case], WIDE, tmp_path / "hf"), tmp_path / "q.gguf"
    with CheckpointSource(open_checkpoint(tiny.folder)) as source:
        write_gguf(
            path,
            source,
            lambda t: (
                "F32"
                if len(t.shape) < 2 or "gate_inp" in t.name
                else "Q5_0"
                if other is not None and other in t.name
                else "Q8_0"
            ),
        )
    step_on_cpu.install(monkeypatch)
    with load_model(path) as model:
        told: list[str] = []
        steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
        context.report_all()
        assert not told
        experts = [branch for branch in steps._branches if isinstance(branch, StepMoE)]
        assert experts and all((b.always is None) == (other is not None) for b in experts)
        assert all((b.shared is None) == (other is None) for b in experts)
        assert all(bool(b.shared.inputs) == (other == "ffn_down_shexp") for b in experts if other)
        settings, tokens = CacheSettings("f32", "f32"), torch.tensor(tiny.tokens[:12])
        expected = model.extend(tokens, model.new_state(64, settings), all_logits=True)
        state = model.new_state(64, settings)
        rows = [steps.extend(piece, state, all_logits=True) for piece in tokens.split([5, 3, 1, 3])]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-3, atol=1e-4)


ACTIVATIONS = [
    FFNSpec("swiglu_oai", limit=1.0),
    FFNSpec("silu", limit=0.02),
    FFNSpec("capped_silu", limit=0.02),
    FFNSpec("gelu_erf"),
]


def activate(network: Network, spec: FFNSpec) -> None:
    """Give every feed-forward layer, experts and shared ones too, this description."""
    for block in network.blocks:
        for branch in block.branches:
            if isinstance(branch.module, MoE):
                branch.module.experts.spec = spec
                if isinstance(branch.module.shared, GatedFFN):
                    branch.module.shared.spec = spec
            elif isinstance(branch.module, GatedFFN):
                branch.module.spec = spec


@pytest.mark.parametrize("spec", ACTIVATIONS, ids=lambda spec: spec.activation)
@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3"])
def test_other_activations(monkeypatch, tmp_path, case, spec):
    """Experts, a shared expert and dense layers whose gate and up are joined in other ways."""
    tiny, path = make_tiny_model(CASES[case], WIDE, tmp_path / "hf"), tmp_path / "f32.gguf"
    iqforge.convert_model(tiny.folder, path, "f32")
    iqforge.quantize_model(path, tmp_path / "q.gguf", Recipe("Q8_0", pure=True))
    step_on_cpu.install(monkeypatch)
    with load_model(tmp_path / "q.gguf") as model:
        settings, tokens = CacheSettings("f32", "f32"), torch.tensor(tiny.tokens[:12])
        before = model.extend(tokens, model.new_state(64, settings), all_logits=True)
        activate(model.network, spec)
        told: list[str] = []
        steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
        context.report_all()
        assert not told and steps.captures
        expected = model.extend(tokens, model.new_state(64, settings), all_logits=True)
        assert (expected - before).abs().max() > 0.01
        state = model.new_state(64, settings)
        rows = [steps.extend(piece, state, all_logits=True) for piece in tokens.split(4)]
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("taken", [1, 2, 5, 6])
def test_recurrent_states_after_steps_that_ran_ahead(monkeypatch, tmp_path, taken):
    """The caller stops, whether an odd or an even number of steps has run, and continues."""
    tiny = make_tiny_model(CASES["qwen3_5"], WIDE, tmp_path / "hf")
    path = tmp_path / "f32.gguf"
    iqforge.convert_model(tiny.folder, path, "f32")
    step_on_cpu.install(monkeypatch)
    launched = []
    with load_model(path) as model:
        steps = StepPath(model.network, Context(CPU))
        run = steps._run
        monkeypatch.setattr(steps, "_run", lambda *args: (launched.append(args), run(*args)))
        settings = CacheSettings("f32", "f32")
        states = [model.new_state(64, settings) for _ in range(2)]
        for state in states:
            model.extend(tiny.tokens[:7], state)
        for _ in range(2):
            expected = list(model.follow(5, states[0], taken, GREEDY))
            before = len(launched)
            drawn = steps.follow(5, states[1], 20, GREEDY)
            assert [next(drawn) for _ in range(taken)] == expected
            # One step has run ahead, and its state is not the one that is left.
            assert len(launched) - before == taken + 1
            with pytest.raises(UsageError, match="has seen"):
                steps.extend(torch.tensor([1]), states[1])
            drawn.close()
            assert states[1].n_past == states[0].n_past
            for one, other in zip(states[0].layers, states[1].layers, strict=True):
                if isinstance(one, RecurrentState) and isinstance(other, RecurrentState):
                    torch.testing.assert_close(other.memory, one.memory, rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(other.inputs, one.inputs, rtol=1e-4, atol=1e-5)
        more = tiny.tokens[7:12]
        found = steps.extend(torch.tensor(more), states[1], all_logits=True)
        wanted = model.extend(more, states[0], all_logits=True)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert any(isinstance(layer, RecurrentState) for layer in states[1].layers)


def test_latent_attention_reads_encoded_caches(monkeypatch, tmp_path):
    tiny = make_tiny_model(CASES["deepseek_v3"], WIDE, tmp_path / "hf")
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    step_on_cpu.install(monkeypatch)
    for type in ("f16", "q8_0"):
        with load_model(tmp_path / "f32.gguf") as model:
            told: list[str] = []
            settings = CacheSettings(type)
            context = Context(CPU, settings=settings, verbose=told.append)
            steps = StepPath(model.network, context)
            context.report_all()
            assert not [x for x in told if "slow path: MLA" in x]
            found = list(steps.follow(5, model.new_state(64, settings), 9, GREEDY))
            assert found == list(model.follow(5, model.new_state(64, settings), 9, GREEDY))


def test_a_cache_that_is_not_in_one_piece_takes_the_slow_path():
    layer = object.__new__(StepAttentionLayer)
    layer.a, layer.layer = SimpleNamespace(spec=SimpleNamespace(kv_from=None)), 0
    layer.device = CPU
    storage = KVStorage(256, 2, 64, 64, CacheSettings(), CPU)
    cache = KVCache(storage, Table(Blocks(4), 256))
    with pytest.raises(Slow, match="do not follow each other"):
        layer.check(SimpleNamespace(layers=[cache]))

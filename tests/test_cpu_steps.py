"""Decoding steps on the CPU as one program, against the reference path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from iqforge.errors import NonFiniteError, UsageError
from iqforge.formats.kernel import inlined_function
from iqforge.runtime.bench.mixer_sizes import KimiDeltaSizes
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cpu.choice import Largest
from iqforge.runtime.layers.attention import Attention
from iqforge.runtime.layers.mla import MLA
from iqforge.runtime.layers.specs import Temperature
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling, candidates, sample
from iqforge.runtime.simd import vectors as v
from iqforge.runtime.simd.operations import operation, packed
from iqforge.runtime.simd.step.hadamard import transform
from iqforge.runtime.simd.step.kept_types import STORES
from iqforge.runtime.simd.threads import Program, run
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.state.hadamard import hadamard
from iqforge.runtime.weights.switches import Switches

from .seed import run_seed
from .short_shapes import shortened

store: Any = None  # what `operation` binds
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
# Rounding of keys and values to f16 may differ where float32 sums do.
CLOSE = 2e-3
FAST = ("llama-tiny", "qwen3moe-tiny", "qwen35-tiny", "deepseek-v3", "phi4-mini")
NOT_PLANNED = (
    *("glm-5", "glm-5.3-flash", "qwen3.8-flash-next", "deepseek-v3.2", "deepseek-v4-flash"),
    *("hy4-preview", "gemma3n-e2b", "gemma3n-e4b"),
    *("mamba-2.8b", "falcon-mamba-7b", "jamba-v0.1"),
    *("gemma4", "gemma4-31b", "gemma4-e4b", "gemma4-tiny"),
)


def opened(spec: str, **options) -> Model:
    return Model(SyntheticSource(spec), **options)


def reference(model: Model, tokens: list[int], settings: CacheSettings | None = None):
    """Logits after every token, layer by layer."""
    state = model.new_state(len(tokens), settings)
    with model.observe(lambda *_: None):
        return [model.extend([token], state) for token in tokens]


def steps(model: Model, tokens: list[int], settings: CacheSettings | None = None):
    """The same by the program, which must exist."""
    state = model.new_state(len(tokens), settings)
    found = [model._step(token, state) for token in tokens]
    assert all(logits is not None for logits in found)
    return found


def assert_close(found, expected, tolerance: float = CLOSE) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def small(name: str, monkeypatch) -> str:
    """Give a spec of a model with this shape, but few and narrow layers."""
    shape = shortened(name, all_experts=True)
    sizes: dict[str, Any] = {"width": 256, "n_vocab": 512}
    if shape.latent is not None:
        sizes["n_heads"] = 8
        if shape.latent.joined:
            sizes["n_kv_heads"] = 8
        if isinstance(recurrent := getattr(shape, "recurrent", None), KimiDeltaSizes):
            sizes["recurrent"] = replace(recurrent, heads=8)
    if shape.dense_hidden:
        sizes["dense_hidden"] = 256
    if not shape.shared:
        sizes["hidden"] = 256
    monkeypatch.setitem(SHAPES, "small", replace(shape, **sizes))
    return "small:Q8_0"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in SHAPES
        if name not in NOT_PLANNED
    ],
)
def test_logits_are_those_of_the_reference_path(name, monkeypatch):
    model = opened(small(name, monkeypatch))
    assert_close(steps(model, TOKENS), reference(model, TOKENS))


@pytest.mark.parametrize(
    "name", ["qwen3moe-tiny", "deepseek-v3", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("reduction", [(1, 0.9), (1, 1.0)])
def test_smart_expert_reduction_of_steps(name, reduction, monkeypatch):
    spec = small(name, monkeypatch)
    full = steps(opened(spec), TOKENS)
    model = opened(spec, switches=Switches(ser=reduction))
    found = steps(model, TOKENS)
    assert_close(found, reference(model, TOKENS))
    assert not torch.allclose(torch.stack(found), torch.stack(full), atol=1e-3)


@pytest.mark.parametrize("name", NOT_PLANNED)
def test_architectures_without_a_program_run_layer_by_layer(name, monkeypatch):
    lines: list[str] = []
    model = opened(small(name, monkeypatch), verbose=lines.append)
    state = model.new_state(8)
    assert torch.equal(model.extend([5], state), reference(model, [5])[0])
    assert len(lines) == 1 and "layer by layer" in lines[0]


@pytest.mark.parametrize("name", ["llama-tiny", "deepseek-v3"])
def test_queries_with_a_temperature(name, monkeypatch):
    """Which grows within these few tokens."""
    model = opened(small(name, monkeypatch))
    [expected] = steps(model, TOKENS[:1])
    for block in model.network.blocks:
        mixer = block.mixer
        assert isinstance(mixer, (Attention, MLA))
        mixer.spec = replace(mixer.spec, temperature=Temperature(3.0, 2))
    model.__dict__.pop("_steps")
    found = steps(model, TOKENS)
    assert torch.equal(found[0], expected)
    assert_close(found, reference(model, TOKENS))


def test_a_rotation_of_long_contexts(monkeypatch):
    """Sequences of both kinds side by side."""
    model = opened(small("phi4-mini", monkeypatch))
    mixer = model.network.blocks[0].mixer
    assert isinstance(mixer, Attention) and mixer.rope is not None and mixer.rope.long is not None
    for capacity in (256, mixer.rope.long[0] + 256, 256):
        found, expected = [], []
        state = model.new_state(capacity)
        with model.observe(lambda *_: None):
            expected = [model.extend([token], state) for token in TOKENS]
        state = model.new_state(capacity)
        found = [model._step(token, state) for token in TOKENS]
        assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("type", ["f32", "bf16"])
def test_caches_of_every_floating_type(type):
    model, settings = opened("llama-tiny:BF16"), CacheSettings(type, type)
    tolerance = 1e-5 if type == "f32" else 1e-2
    assert_close(steps(model, TOKENS, settings), reference(model, TOKENS, settings), tolerance)


def test_digits_do_not_depend_on_the_number_of_threads():
    model, found = opened("qwen3moe-tiny:Q8_0"), []
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 2):
            torch.set_num_threads(n)
            found.append(torch.stack(steps(model, TOKENS)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("name", ["llama-tiny", "deepseek-v3", "gpt-oss-20b", "gemma2-9b"])
def test_attention_over_several_blocks(name, monkeypatch):
    """Heads with the same keys, which threads share in any way; windows; pieces that are cut."""
    model, found = opened(small(name, monkeypatch)), []
    state, before = model.new_state(256), torch.get_num_threads()
    model.extend((TOKENS * 20)[:150], state)
    prompt = state.snapshot()
    try:
        for n in (1, 2, 3, 5):
            torch.set_num_threads(n)
            state.restore(prompt)
            found.append(torch.stack([model._step(token, state) for token in TOKENS]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits, found[0]) for logits in found)
    state.restore(prompt)
    with model.observe(lambda *_: None):
        assert_close(found[0], [model.extend([token], state) for token in TOKENS])


def test_steps_follow_prompts_truncation_and_snapshots():
    model = opened("llama-tiny:BF16")
    state = model.new_state(300)
    model.extend(TOKENS * 10, state)  # more than a block of the cache
    expected = [model._step(token, state) for token in (7, 8)]
    state.truncate(len(TOKENS) * 10)
    snapshot = state.snapshot()
    assert torch.equal(model._step(7, state), expected[0])
    state.restore(snapshot)
    assert torch.equal(model._step(7, state), expected[0])
    assert torch.equal(model._step(8, state), expected[1])
    prompt = model.extend([*(TOKENS * 10), 7, 8], model.new_state(300))
    assert_close([expected[1]], [prompt])


def test_recurrent_states_go_back_by_snapshots_alone():
    model = opened("qwen35-tiny:Q8_0")
    state = model.new_state(32)
    model.extend(TOKENS, state)
    snapshot = state.snapshot()
    expected = model._step(7, state)
    with pytest.raises(UsageError):
        state.truncate(len(TOKENS))
    state.restore(snapshot)
    assert torch.equal(model._step(7, state), expected)
    state.clear()
    assert_close([model._step(token, state) for token in TOKENS], reference(model, TOKENS))


def test_sequences_of_one_pool_with_several_lengths():
    model = opened("llama-tiny:BF16")
    pool = model.new_pool(512, 3)
    states = [pool.sequence() for _ in range(3)]
    lengths = (70, 5, 130)
    for state, n in zip(states, lengths, strict=True):
        model.extend((TOKENS * 20)[:n], state)
    found = [[model._step(token, state) for state in states] for token in (7, 8)]
    for i, n in enumerate(lengths):
        alone = model.new_state(256)
        model.extend((TOKENS * 20)[:n], alone)
        assert torch.equal(found[0][i], model._step(7, alone))
        assert torch.equal(found[1][i], model._step(8, alone))


def test_replaced_tensors_are_seen_at_once():
    model = opened("llama-tiny:BF16")
    [expected] = steps(model, [5])
    store, name = model.weights.store, "blk.0.ffn_down.weight"
    tensor = next(t for t in model.source.tensors if t.name == name)
    rows = model.source.read_rows(tensor, 0, tensor.n_rows)
    store.replace(name, tensor.type, np.zeros_like(rows))
    [changed] = steps(model, [5])
    assert not torch.equal(changed, expected)
    assert_close([changed], reference(model, [5]))
    store.restore(name)
    assert torch.equal(steps(model, [5])[0], expected)


def test_a_product_that_is_not_finite_is_named():
    model = opened("llama-tiny:BF16")
    name = "blk.1.ffn_up.weight"
    tensor = next(t for t in model.source.tensors if t.name == name)
    rows = model.source.read_rows(tensor, 0, tensor.n_rows).copy()
    rows.view(np.uint16)[:] = 0x7FC0
    model.weights.store.replace(name, tensor.type, rows)
    state = model.new_state(8)
    with pytest.raises(NonFiniteError) as error:
        model.extend([5], state)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "type",
    [
        pytest.param(name, marks=() if name in ("q8_0", "q5_1") else pytest.mark.slow)
        for name, found in CACHE_TYPES.items()
        if found.is_quantized
    ],
)
def test_rows_of_quantized_caches_are_those_of_the_reference_path(type):
    """Byte for byte, also of zeros and of numbers that a half cannot hold."""
    rng = np.random.default_rng(run_seed())
    x = rng.standard_normal((40, 128)).astype(np.float32) * np.logspace(-6, 5, 40)[:, None]
    x = x.astype(np.float32)
    x[3], x[4, :32], x[30] = 0, np.abs(x[4, :32]), np.round(x[30])
    found = CACHE_TYPES[type]
    assert found.encode is not None
    expected = found.encode(torch.from_numpy(x)).numpy()
    out = np.zeros_like(expected)
    store = operation(_store_rows, f"store_rows_{type}", store=inlined_function(STORES[found.name]))
    arguments = packed(out.ctypes.data, x.ctypes.data, len(x), x.shape[1], out.shape[1])
    run(Program([(store, arguments)]), 1)
    assert np.array_equal(out, expected)


def _store_rows(arguments, thread, threads):
    to, x = v.integer_at(arguments), v.integer_at(arguments + 8)
    n = v.integer_at(arguments + 24)
    for i in range(v.integer_at(arguments + 16)):
        store(to + i * v.integer_at(arguments + 32), x + 4 * n * i, n)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["llama-tiny:BF16", "deepseek"])
@pytest.mark.parametrize(("keys", "values"), [("q8_0", "q4_0"), ("q8_kv", "iq4_nl")])
def test_steps_with_quantized_caches(spec, keys, values, monkeypatch):
    spec = small("deepseek-v3", monkeypatch) if spec == "deepseek" else spec
    model, settings = opened(spec), CacheSettings(keys, values)
    assert_close(steps(model, TOKENS, settings), reference(model, TOKENS, settings), 2e-2)


CACHES = [
    ("llama-tiny", "q8_0", "q8_0"),
    ("deepseek-v3", "q8_0", "q8_0"),
    ("qwen35-tiny", "q8_0", "q5_1"),  # gates
    ("ministral3-14b", "q8_0", "q8_0"),  # a temperature
    ("qwen3-8b", "q8_kv", "q6_0"),  # norms of heads
    ("llama-tiny", "q4_0", "iq4_nl"),
]
# Each case has code of its own to compile. Keys and values are transformed apart from each other,
# which the first cases show; in the others both are.
BOTH = (True, True)
TURNS = [
    pytest.param(
        *case, turns, marks=[] if turns == BOTH or case in CACHES[:2] else pytest.mark.full
    )
    for case in CACHES
    for turns in ((True, False), BOTH, (False, True))
]


@pytest.mark.parametrize(("name", "keys", "values", "turns"), TURNS)
def test_steps_with_caches_after_a_hadamard_transform(name, keys, values, turns, monkeypatch):
    model = opened(small(name, monkeypatch))
    settings = CacheSettings(keys, values, *turns)
    assert_close(steps(model, TOKENS, settings), reference(model, TOKENS, settings), 2e-2)


@pytest.mark.parametrize(("n", "block"), [(32, 32), (96, 32), (128, 128), (576, 64), (1024, 512)])
def test_hadamard_transforms_are_those_of_the_reference_path(n, block):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
    expected = hadamard(x, block)
    arguments = packed(x.data_ptr(), n, len(x), block, block**-0.5)
    run(Program([(operation(transform), arguments)]), 2)
    assert torch.equal(x, expected)


def test_what_is_not_planned_runs_layer_by_layer_and_is_said(monkeypatch):
    lines: list[str] = []
    model = opened(small("glm-5", monkeypatch), verbose=lines.append)
    state = model.new_state(8)
    assert model._step(5, state) is None and state.n_past == 0
    assert torch.equal(model.extend([5], state), reference(model, [5])[0])
    assert len(lines) == 1 and "layer by layer" in lines[0]


def test_observers_that_read_inputs_see_the_reference_path():
    model, seen = opened("llama-tiny:BF16"), []
    state = model.new_state(8)
    with model.observe(lambda name, x, _: seen.append((name, tuple(x.shape)))):
        model.extend([5], state)
    assert len(seen) > 2
    passes: list[str] = []
    with model.observe(lambda name, *_: passes.append(name), reads=False):
        list(model.follow(5, state, 3, Sampling(temperature=0)))
    assert passes == [seen[0][0], seen[-1][0]] * 3


@pytest.mark.parametrize("n", [40, 1000, 4099])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_the_largest_logits_are_those_of_a_sort(n, k):
    """Also among equals, and in any order."""
    find = Largest()
    rng = np.random.default_rng(n + k)
    for logits in (rng.standard_normal(n), rng.integers(0, 9, n), np.arange(n), -np.arange(n)):
        x = torch.tensor(logits, dtype=torch.float32)
        found = find(x, k)
        assert found is not None
        expected = candidates(x, k)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert find(x, 0) is None and find(x, n + 1) is None
    for place in (0, n // 2, n - 1):
        for value in (np.nan, np.inf, -np.inf):
            broken = x.clone()
            broken[place] = value
            assert find(broken, k) is None


def test_generated_tokens_do_not_depend_on_how_candidates_are_found():
    model, sampling = opened("llama-tiny:BF16"), Sampling(seed=5, temperature=1.5)
    found = list(model.follow(5, model.new_state(40), 40, sampling))
    token, expected, state = 5, [], model.new_state(40)
    for _ in range(40):
        token = sample(model.extend([token], state), sampling, state.n_past)
        expected.append(token)
    assert found == expected

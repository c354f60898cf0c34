"""Gemma 3n: streams that layers hand on, and gates of which few elements are left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import iqforge
import pytest
import torch
from iqforge.errors import ConfigError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import ValueType, array, u32
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.layers.rowwise.sparse_gate import AbsentSparseFFN, SparseGate
from iqforge.runtime.layerwise import LayerPass, after_layer, first_states, layers_are_separate
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.split_model import make_stage
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.placement import CPU as CPU_DEVICE
from iqforge.runtime.weights.switches import Switches

from . import prompt_on_cpu
from .step_graphs_on_cpu import CPU
from .thread_ranks import ThreadMeeting, on_ranks
from .tiny_cases import CASES, SMALL, WIDE
from .tiny_model import write_gguf
from .tiny_models import HALF, make_tiny_model

EXACT = CacheSettings("f32", "f32")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, list[int]]:
    """(f32 file, token ids)"""
    folder = tmp_path_factory.mktemp("small")
    tiny = make_tiny_model(CASES["gemma3n"], SMALL, folder / "hf")
    return iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32"), tiny.tokens


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, list[int]]:
    """(bf16 file, token ids), of a model whose first layer no later one needs."""
    folder, usual = tmp_path_factory.mktemp("wide"), CASES["gemma3n"].config(WIDE)
    case = replace(CASES["gemma3n"], config=lambda _: usual | {"num_kv_shared_layers": 1})
    tiny = make_tiny_model(case, WIDE, folder / "hf", HALF)
    return iqforge.convert_model(tiny.folder, folder / "bf16.gguf", "bf16"), tiny.tokens


@pytest.mark.parametrize("cutoff", [-0.5, 0.0, 1.6448536])
def test_what_is_left_of_a_gate(cutoff):
    x = torch.randn(5, 400, generator=torch.Generator().manual_seed(1)) + 3
    mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True, unbiased=False)
    expected = (x - mean - cutoff * deviation).clamp(min=0)
    torch.testing.assert_close(SparseGate(cutoff)(x), expected)
    below = torch.distributions.Normal(0, 1).cdf(torch.tensor(cutoff))
    assert (expected > 0).float().mean() == pytest.approx(1 - float(below), abs=0.03)


def test_a_gate_on_ranks():
    """Some have few of its elements, one has none; the mean is far from zero."""
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) + 300
    parts = x.split([24, 15, 1], dim=1)

    def work(rank: int, meeting: ThreadMeeting) -> torch.Tensor:
        def gather(numbers: torch.Tensor) -> torch.Tensor:
            return meeting.gather(numbers, [3, 6, 9, 12])

        if rank == 3:
            return AbsentSparseFFN(gather)(torch.ones(5, 7))
        return SparseGate(0.5, gather)(parts[rank])

    *found, absent = on_ranks(4, work)
    torch.testing.assert_close(torch.cat(found, 1), SparseGate(0.5)(x), rtol=0, atol=1e-4)
    assert absent.shape == (5, 7) and not absent.any()


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (0, 1), (1, 0, 1)])
def test_ranks_with_layers_hand_all_streams_on(small, shares, tmp_path):
    file, tokens = small
    path = tmp_path / "m.gguf"
    with open_gguf(file) as source:  # keys that are not shared can be on different ranks
        write_gguf(path, source, metadata={"gemma3n.attention.shared_kv_layers": u32(3)})

    def evaluated(model: Model) -> list:
        state = model.new_state(64, EXACT)
        pieces = [model.extend(tokens[i : i + 12], state) for i in range(0, 36, 12)]
        drawn = list(model.follow(5, state, 3, Sampling(seed=7)))
        return [model.forward(tokens), *pieces, torch.tensor(drawn)]

    def work(rank: int, meeting: ThreadMeeting) -> tuple[range, list]:
        source = open_gguf(path)
        stage = make_stage(source, shares, meeting, CPU_DEVICE)
        with Model(source, stage=stage, ubatch=5) as model:
            return model.network.layers, evaluated(model)

    with load_model(path, ubatch=5) as model:
        expected, n_layers = evaluated(model), len(model.network.blocks)
    ranks = on_ranks(len(shares), work)
    assert [layer for layers, _ in ranks for layer in layers] == list(range(n_layers))
    assert sum(len(layers) > 0 for layers, _ in ranks) > 1 or shares == (0, 1)
    for _, found in ranks:
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def test_layer_by_layer(small):
    """A layer may run again; what earlier ones have left is dropped."""
    file, tokens = small
    with load_model(file) as model:
        assert not layers_are_separate(model)
        expected = model.hidden(torch.tensor(tokens)[None])[0]
        one = LayerPass(torch.tensor(tokens)[None])
        h = first_states(model, one)
        for layer in range(len(model.network.blocks)):
            again = after_layer(model, layer, one, h.clone())
            h = after_layer(model, layer, one, h)
            assert torch.equal(h, again)
            streams = [key for key in one.scratch if key[0] == "streams"]
            assert len(streams) <= 2
        torch.testing.assert_close(model.network.output_norm(h), expected)


def test_products_in_8_bits(wide):
    """Compiled layers write into the memory of what branches give."""
    file, tokens = wide
    with load_model(file) as model:
        expected = model.forward(tokens)
    with load_model(file, precision="int8") as model:
        found = model.forward(tokens)
    off = (found - expected).abs().amax(1) / expected.abs().max()
    assert 0 < off.max() < 0.1, off


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    off = (found - expected).abs().amax(1) / expected.abs().max()
    assert off.max() < 0.05, off


SLOW = {"AltUpPredict", "Laurel", "AltUpCorrect", "AltUpMerge", "GatedFFN"}


def test_prompts_between_kernels(monkeypatch, wide):
    """On a GPU streams are joined on the reference path, and attention is not."""
    file, ids = wide
    prompt_on_cpu.install(monkeypatch)
    with load_model(file, switches=Switches(swa_full=True)) as model:
        tokens = torch.tensor(ids)[None]
        expected = model.hidden(tokens)[0]
        context = Context(CPU, torch.float16, None, ubatch=64)
        path = PromptPath(model.network, context)
        assert {kind for kind, *_ in context.slow} == SLOW

        def normed(h: torch.Tensor) -> torch.Tensor:
            return model.network.output_norm(h).clone()

        every = normed(path.run(tokens, 0))
        near(every, expected)
        torch.testing.assert_close(normed(path.run(tokens, 0, last=True)), every[-1:])
        state, rows = model.new_state(64, CacheSettings()), []
        for first, end in ((0, 13), (13, 14), (14, 40)):
            state.reserve(end - first)
            rows.append(normed(path.run(tokens[:, first:end], first, state)))
            state.advance(end - first)
        near(torch.cat(rows), expected)


def test_steps_between_kernels(monkeypatch, wide):
    file, ids = wide
    prompt_on_cpu.install(monkeypatch)
    with load_model(file, switches=Switches(swa_full=True)) as model:
        tokens = torch.tensor(ids)
        expected = model.extend(tokens, model.new_state(64, EXACT), all_logits=True)
        told: list[str] = []
        steps = StepPath(model.network, context := Context(CPU, verbose=told.append))
        context.report_all()
        assert told and not steps.captures
        state = model.new_state(64, EXACT)
        found = [steps.extend(x, state, all_logits=True) for x in tokens.split([8, 3, 1, *[4] * 7])]
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-3, atol=1e-3)


def test_ranks_with_layers_between_kernels(monkeypatch, wide):
    """Prompts and steps hand all streams on."""
    file, ids = wide
    with load_model(file, switches=Switches(swa_full=True)) as model:
        tokens = torch.tensor(ids)
        expected = model.extend(tokens, model.new_state(64, EXACT), all_logits=True)
    prompt_on_cpu.install(monkeypatch)

    def work(rank: int, meeting: ThreadMeeting) -> tuple[int, torch.Tensor]:
        source = open_gguf(file)
        stage = make_stage(source, (1, 1), meeting, CPU_DEVICE)
        with Model(source, stage=stage, switches=Switches(swa_full=True)) as model:
            context = Context(CPU, torch.float16, None, ubatch=64)
            prompt, steps = (kind(model.network, context) for kind in (PromptPath, StepPath))
            state = model.new_state(64, EXACT)
            state.reserve(30)
            h = model.network.output_norm(prompt.run(tokens[None, :30], 0, state))
            state.advance(30)
            rows = [prompt.logits(h).float()]
            rows += [steps.extend(x, state, all_logits=True) for x in tokens[30:].split(5)]
            return len(model.network.layers), torch.cat(rows)

    ranks = on_ranks(2, work)
    assert all(n for n, _ in ranks)
    for _, found in ranks:
        near(found, expected)


def test_importances_and_what_quantizing_keeps(wide, tmp_path):
    """Observers see the rows of every stream."""
    file, tokens = wide
    seen: dict[str, torch.Tensor | None] = {}
    with load_model(file) as model, model.observe(lambda name, x, of: seen.update({name: of})):
        model.forward(tokens)
    for name in ("altup_proj.weight", "altup_unembd_proj.weight"):
        streams = seen[name]
        assert streams is not None and streams.bincount().tolist() == [len(tokens)] * 3
    text, out = tmp_path / "text.txt", tmp_path / "m.imatrix"
    text.write_text("the number of tensors, their shapes and types, the place of every byte. " * 40)
    iqforge.collect_imatrix(file, text, out, n_ctx=32, chunks=2, device="cpu")
    path = tmp_path / "q.gguf"
    iqforge.quantize_model(file, path, "IQ4_K", imatrix=out)
    with open_gguf(path) as found:
        types = {t.name.removeprefix("blk.1."): t.type.name for t in found.tensors}
    kept = ("altup_proj", "altup_unembd_proj", "altup_router", "laurel_l", "per_layer_model_proj")
    assert {types[f"{name}.weight"] for name in kept} == {"BF16"}
    assert {types[f"{name}.weight"] for name in ("inp_gate", "ffn_up", "attn_q")} == {"IQ4_K"}


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"altup.active_idx": u32(1)}, "altup.active_idx' is 1, expected 0 to 0"),
        ({"altup.num_inputs": u32(1)}, "altup.num_inputs' is 1"),
        ({"attention.shared_kv_layers": u32(5)}, "no layer before has the keys and values"),
        (
            {"activation_sparsity_scale": array(ValueType.FLOAT32, [float("inf")] * 7)},
            "activation_sparsity_scale",
        ),
        ({"activation_sparsity_scale": array(ValueType.FLOAT32, [1.0] * 6)}, "has 6 items"),
    ],
)
def test_keys_that_are_refused(small, tmp_path, keys, words):
    with open_gguf(small[0]) as source:
        metadata = {f"gemma3n.{key}": value for key, value in keys.items()}
        path = write_gguf(tmp_path / "m.gguf", source, metadata=metadata)
    with pytest.raises(ConfigError, match=words):
        load_model(path)

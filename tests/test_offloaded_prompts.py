"""Prompts on a GPU whose experts are on the CPU, without a GPU: kernels are plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.cuda.prompt import locked, offloaded
from iqforge.runtime.cuda.prompt.locked import LockedMemory
from iqforge.runtime.cuda.prompt.offloaded import ExpertCopies
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.experts import experts_of
from iqforge.runtime.weights.switches import Switches

from .offloaded_on_cpu import Driver, install_copies
from .step_graphs_on_cpu import CPU
from .tiny_cases import CASES, WIDE
from .tiny_models import make_tiny_model
from .torch_threads import torch_threads

SPEC = "qwen3moe-four:Q8_0"


@pytest.fixture
def installed(monkeypatch):
    install_copies(monkeypatch)
    four = replace(SHAPES["qwen3moe-tiny"], n_layers=4)
    monkeypatch.setitem(SHAPES, "qwen3moe-four", four)
    with torch_threads(1):
        yield


@pytest.fixture
def model(installed):
    with Model(SyntheticSource(SPEC), CPU) as model:
        yield model


def copies_of(context: Context) -> ExpertCopies:
    return context.once("expert copies", lambda: None)


def nearest(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the least relative error of a row."""
    return float(((found - truth).norm(dim=1) / truth.norm(dim=1)).min())


def check(model: Model, path: PromptPath, tokens: torch.Tensor) -> None:
    """Compare with the reference path. Activations in float16 may choose another expert for a row,
    which later rows see as well.
    """
    truth = model.hidden(tokens)[:, 0]
    found = model.network.output_norm(path.run(tokens, 0)).view(*tokens.shape, -1)[:, 0]
    assert nearest(found, truth) < 0.01


@pytest.mark.parametrize("refuses", [False, True])
def test_prompts_are_those_of_the_reference_path(model, monkeypatch, refuses):
    driver = Driver(monkeypatch, refuses)
    monkeypatch.setattr(locked, "_PIECE_BYTES", 100_000)  # several of each tensor
    copied = counted(monkeypatch)
    told: list[str] = []
    context = Context(CPU, torch.float16, None, ubatch=64, verbose=told.append)
    path = PromptPath(model.network, context)
    context.report_all()
    assert not [line for line in told if "not on" in line]
    tokens = torch.randint(0, 512, (8, 40))
    check(model, path, tokens)
    assert copied == [0, 1, 2, 3]  # two places
    check(model, path, tokens)
    assert copied == [0, 1, 2, 3] * 2
    check(model, path, tokens[:, :3])  # few rows: on the CPU
    assert copied == [0, 1, 2, 3] * 2
    experts = [x for x in model.source.tensors if "_exps" in x.name]
    in_file = sum(x.n_bytes for x in experts)
    assert sum(driver.locked.values()) == (0 if refuses else in_file)
    lines = [line for line in told if "page-locked" in line]
    assert len(lines) == 1 and ("CUDA_ERROR_OUT_OF_MEMORY" in lines[0]) == refuses
    context.close()
    assert not driver.locked


def quantized(folder: Path, name: str) -> Path:
    """Return a file of a random model. It has to be made before anything is replaced."""
    tiny, path = make_tiny_model(CASES[name], WIDE, folder / "hf"), folder / "q.gguf"
    iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32")
    iqforge.quantize_model(folder / "f32.gguf", path, Recipe("Q8_0", pure=True))
    return path


@pytest.fixture(params=["gemma4_moe", "command_a_plus"])
def beside(request, tmp_path):
    """The file of a model whose experts are next to a dense layer, or to attention."""
    return quantized(tmp_path, request.param)


@pytest.fixture(params=["gpt_oss", "qwen3_moe"])
def separate(request, tmp_path):
    """The file of a model whose gate and up can be merged, with biases and without."""
    return quantized(tmp_path, request.param)


def test_merged_gate_and_up_are_copied_apart(separate, installed, monkeypatch):
    Driver(monkeypatch)
    copied, told = counted(monkeypatch), []
    with load_model(separate, switches=Switches(swa_full=True, merge_gate_up=True)) as model:
        merged = [moe.experts.gate_up for b in model.network.blocks for moe in experts_of(b)]
        assert merged and all(len(x.tensors) == 2 for x in merged)
        context = Context(CPU, torch.float16, None, ubatch=64, verbose=told.append)
        prompts = PromptPath(model.network, context)
        context.report_all()
        assert not [line for line in told if "not on" in line or "tensors" in line]
        check(model, prompts, torch.randint(2, 300, (8, 40)))
        assert copied == [0, 1]
        context.close()


def test_experts_next_to_others(beside, installed, monkeypatch):
    Driver(monkeypatch)
    copied, told = counted(monkeypatch), []
    with load_model(beside) as model:
        context = Context(CPU, torch.float16, None, ubatch=64, verbose=told.append)
        prompts = PromptPath(model.network, context)
        context.report_all()
        assert not [line for line in told if "not on" in line]
        tokens = torch.randint(2, 300, (8, 40))
        check(model, prompts, tokens)
        layers = [*range(len(model.network.blocks))]
        assert copied == layers and prompts.most_together >= 1
        check(model, prompts, tokens[:, :3])  # few rows: on the CPU
        assert copied == layers
        context.close()
        # In pieces that share copies, and the last row alone.
        engine = Engine(model.network, Context(CPU, torch.float16, None, ubatch=32))
        assert engine.tokens_together > 70
        tokens = torch.randint(2, 300, (70,))
        truth = model.extend(tokens, model.new_state(80), all_logits=True)
        together = engine.extend(tokens, model.new_state(80), all_logits=True)
        assert copied == layers * 2 and nearest(together, truth) < 0.01
        last = engine.extend(tokens, model.new_state(80))
        assert (last - together[-1]).norm() < 0.01 * last.norm()
        engine.close()


def counted(monkeypatch) -> list[int]:
    """Return the layers whose experts are copied from now on."""
    copied, real = [], ExpertCopies._copy

    def copy(copies, number, free):
        copied.append(number)
        return real(copies, number, free)

    monkeypatch.setattr(ExpertCopies, "_copy", copy)
    return copied


def test_pieces_of_a_prompt_share_copies(model, monkeypatch):
    Driver(monkeypatch)
    copied = counted(monkeypatch)
    engine = Engine(model.network, Context(CPU, torch.float16, None, ubatch=32))
    tokens = torch.randint(0, 512, (70,))
    state = model.new_state(80)
    together = engine.extend(tokens, state, all_logits=True)
    assert copied == [0, 1, 2, 3] and state.n_past == 70
    last = engine.extend(tokens, model.new_state(80))
    assert (last - together[-1]).norm() < 0.01 * last.norm()
    copied.clear()
    assert engine.tokens_together == 32 * engine.prompt.most_together > 70
    monkeypatch.setattr(engine.prompt, "most_together", 1)
    apart = engine.extend(tokens, model.new_state(80), all_logits=True)
    assert copied == [0, 1, 2, 3] * 2  # the last piece is short
    assert torch.equal(together[:64], apart[:64])
    truth = model.extend(tokens, model.new_state(80), all_logits=True)
    assert nearest(together, truth) < 0.01 and nearest(together[64:], apart[64:]) < 0.02
    engine.extend(torch.tensor([1]), state)  # a step after it
    assert state.n_past == 71
    engine.close()


def test_memory_is_locked_once_and_until_nobody_needs_it(monkeypatch):
    driver = Driver(monkeypatch)
    first, second = np.zeros((4, 34), np.uint8), np.ones((8, 34), np.uint8)
    memory = LockedMemory(CPU)
    assert memory.lock("a", first) and memory.lock("a", first) and memory.lock("b", second)
    assert list(driver.locked.values()) == [136, 272] and memory.n_bytes == 408
    other = first.copy()  # a tensor that was replaced
    assert memory.lock("a", other)
    assert set(driver.locked) == {second.ctypes.data, other.ctypes.data}
    assert memory.n_bytes == 408
    driver.refuses = True
    assert not memory.lock("c", first) and memory.refused == "CUDA_ERROR_OUT_OF_MEMORY"
    driver.refuses = False
    assert not memory.lock("c", first)  # not tried again for each copy
    monkeypatch.setenv("IQFORGE_LOCK", "0")
    assert not memory.lock("d", np.zeros((4, 34), np.uint8)) and memory.lock("b", second)
    memory.close()
    assert not driver.locked and not memory.n_bytes
    monkeypatch.delenv("IQFORGE_LOCK")
    memory = LockedMemory(CPU)
    assert memory.lock("a", first)
    del memory
    assert not driver.locked


def test_a_copy_that_fails_is_tried_again(model, monkeypatch):
    Driver(monkeypatch)
    context = Context(CPU, torch.float16, None, ubatch=64)
    path = PromptPath(model.network, context)
    tokens = torch.randint(0, 512, (8, 40))

    def failed(*arguments):
        raise torch.cuda.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertCopies, "_copy", failed)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            path.run(tokens, 0)
    check(model, path, tokens)
    context.close()


def test_without_memory_experts_stay_on_the_cpu(model, monkeypatch):
    def full(size, **options):
        raise torch.cuda.OutOfMemoryError("no memory")

    told: list[str] = []
    context = Context(CPU, torch.float16, None, ubatch=64, verbose=told.append)
    model.weights.store.load()
    with monkeypatch.context() as patch:
        patch.setattr(offloaded.torch, "zeros", full)
        path = PromptPath(model.network, context)
    context.report_all()
    assert any("no memory for copies of experts" in line for line in told)
    assert not copies_of(context)._layers
    check(model, path, torch.randint(0, 512, (8, 40)))

"""Which lines about slower paths commands print."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.commands.slow_paths import SlowPaths
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.held import on_cpu
from iqforge.runtime.cuda.common.registry import Placed, Slow
from iqforge.runtime.cuda.prompt.path import PromptPath
from iqforge.runtime.cuda.step.path import StepPath
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.experts import moe_layers

from . import prompt_on_cpu
from .step_graphs_on_cpu import CPU
from .tiny_model import one_tensor_per_expert, write_gguf

SLOW = "slow path: MoE of layer 3: a reason"
PLACED = "slow path, as placed: Attention of 2 layers from 1: another device"
OTHER = "experts on the CPU: 1.0 GiB are page-locked"


@pytest.mark.parametrize(
    "everything, said", [(False, [SLOW]), (True, [SLOW, PLACED, OTHER])], ids=["default", "verbose"]
)
def test_lines(capsys, everything, said):
    say = SlowPaths(everything)
    context = Context(torch.device("cpu"), verbose=say)
    context.report("MoE", Slow("a reason"), 3)
    for layer in (1, 2):
        context.report("Attention", Placed("another device"), layer)
    context.report_all()
    say(OTHER)
    assert capsys.readouterr().err.splitlines() == said


def slow_lines(network, make) -> list[str]:
    """Return what an executor of a network reports."""
    told: list[str] = []
    context = Context(CPU, torch.float16, None, ubatch=64, verbose=told.append)
    make(network, context)
    context.report_all()
    return told


PATHS = pytest.mark.parametrize("make", [PromptPath, StepPath])


@PATHS
def test_rows_that_cannot_be_packed_are_no_placement(monkeypatch, make):
    prompt_on_cpu.install(monkeypatch)
    monkeypatch.setitem(SHAPES, "uneven", replace(SHAPES["llama-tiny"], hidden=520))
    with Model(SyntheticSource("uneven:F16"), CPU) as model:
        [line] = slow_lines(model.network, make)
    assert line.startswith("slow path: GatedFFN of 2 layers from 0: ffn_down has rows of 520")


@PATHS
def test_experts_in_tensors_of_several_types_are_no_placement(monkeypatch, tmp_path, make):
    old, mixed = tmp_path / "old.gguf", tmp_path / "mixed.gguf"
    one_tensor_per_expert(old, SyntheticSource("qwen3moe-tiny:Q8_0"))
    with open_gguf(old) as source:
        other = "blk.0.ffn_up.3.weight"
        write_gguf(mixed, source, lambda t: "Q4_0" if t.name == other else t.type.name)
    prompt_on_cpu.install(monkeypatch)
    with load_model(mixed) as model:
        lines = [x for x in slow_lines(model.network, make) if "of layer 0" in x]
    assert len(lines) == 1 and "slow path: MoE" in lines[0]
    assert "ffn_up_exps is in several tensors" in lines[0]


@PATHS
@pytest.mark.parametrize("names", [("down",), ("gate", "up")], ids=" ".join)
def test_experts_of_which_some_are_on_the_cpu_are_placed_so(monkeypatch, make, names):
    prompt_on_cpu.install(monkeypatch)
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0"), CPU) as model:
        for moe in moe_layers(model.network):
            for name in names:
                for matrix in getattr(moe.experts, name).matrices:
                    matrix.device = torch.device("meta")  # stands for another device
        lines = slow_lines(model.network, make)
    assert lines and all(line.startswith("slow path, as placed: MoE") for line in lines)


def test_some_experts_on_the_cpu_are_neither_copied_nor_answered_for():
    with Model(SyntheticSource("qwen3moe-tiny:Q8_0"), CPU) as model:
        [moe, *_] = moe_layers(model.network)
        context = Context(torch.device("meta"))
        assert on_cpu(moe, context)
        moe.experts.down.matrices[0].device = torch.device("meta")
        with pytest.raises(Placed, match="some matrices of its experts are on the CPU"):
            on_cpu(moe, context)

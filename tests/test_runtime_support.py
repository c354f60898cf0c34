"""Architectures that run, and their paths: the declarations agree with the networks that are
built.
"""

from __future__ import annotations

import re
from pathlib import Path

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import ArchitectureError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import string
from iqforge.runtime.architectures import architecture, architectures
from iqforge.runtime.cuda import engine  # noqa: F401, it declares executors
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.common.registry import (
    PROMPT,
    STEP,
    Slow,
    check_description,
    choose_all,
    placed,
)
from iqforge.runtime.layers.mla import MLA
from iqforge.runtime.model import load_model
from iqforge.runtime.support import supported_architectures

from .shared import shared
from .tiny_cases import CASES, SMALL
from .tiny_model import write_gguf
from .tiny_models import make_tiny_model

MODELS = {
    "deepseek2": ["deepseek_v2", "deepseek_v3"],
    "gemma3": ["gemma3"],
    "gemma4": ["gemma4_e", "gemma4_moe"],
    "glm4moe": ["glm4_moe"],
    "glm-dsa": ["glm_moe_dsa"],
    "gpt-oss": ["gpt_oss_bf16"],
    "llama": ["llama", "mixtral"],
    "mistral3": ["ministral3"],
    "mistral4": ["mistral4"],
    "phi3": ["phi3"],
    "qwen2": ["qwen2"],
    "qwen3": ["qwen3"],
    "qwen35": ["qwen3_5"],
    "qwen35moe": ["qwen3_5_moe"],
    "qwen3next": ["qwen3_next"],
    "qwen3moe": ["qwen3_moe"],
}


def test_every_architecture_says_how_it_runs():
    found = supported_architectures()
    assert set(found) == {*MODELS, *RANDOM}
    for name, support in found.items():
        assert support.architecture == name and support.cpu and support.tensor_parallel


# Architectures without files in golden/: random models of these classes instead.
RANDOM = sorted({case.architecture for case in CASES.values()} - set(MODELS))


def slow_branches(path: Path) -> list[str]:
    """Name the branches of blocks that no kernels evaluate, and why."""
    slow = []
    with load_model(path) as model:
        for branch in placed(model.network.blocks):
            try:
                check_description(branch.branch)
                assert type(branch.module) in PROMPT and type(branch.module) in STEP
            except Slow as reason:
                slow.append(f"{branch.name}: {reason}")
    return slow


@pytest.mark.parametrize("name", MODELS)
def test_kernels_evaluate_all_that_they_are_said_to(name):
    """The declaration is about descriptions: an architecture runs on the fast path if kernels
    evaluate every branch of its blocks.
    """
    slow = []
    for folder in MODELS[name]:
        slow += slow_branches(shared(f"golden/convert/{folder}/expected-f32.gguf"))
    assert supported_architectures()[name].gpu == (not slow), slow


@pytest.mark.parametrize("name", RANDOM)
def test_kernels_evaluate_all_that_they_are_said_to_of_random_models(name, tmp_path):
    slow = []
    for case in CASES.values():
        if case.architecture == name:
            tiny = make_tiny_model(case, SMALL, tmp_path / case.name)
            slow += slow_branches(
                iqforge.convert_model(tiny.folder, tmp_path / f"{case.name}.gguf", "f32")
            )
    assert supported_architectures()[name].gpu == (not slow), slow


def test_generate_names_an_architecture_that_cannot_run_before_its_tokenizer(tmp_path, capsys):
    """The vocabulary of such a file may need an unsupported tokenizer as well."""
    keys = {
        "general.architecture": string("dbrx"),
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("nothing-known"),
    }
    with open_gguf(shared("golden/convert/llama/expected-f32.gguf")) as source:
        path = write_gguf(tmp_path / "dbrx.gguf", source, metadata=keys)
    assert main(["generate", "--device", "cpu", "-m", str(path), "-p", "a", "-n", "1"]) == 1
    told = capsys.readouterr().err
    assert "architecture 'dbrx' cannot run yet; the runtime supports " in told
    assert f"supports {', '.join(sorted(architectures()))}\n" in told
    assert "tokenizer" not in told
    with pytest.raises(ArchitectureError, match="'dbrx' cannot run yet"):
        load_model(path)


def test_the_page_shows_the_file_as_it_is():
    """The guide shows a real file, and the files that it refers to exist."""
    root = Path(__file__).parents[1]  # of the clone: an installed package has no docs/
    page = (root / "docs/guide/running-an-architecture.md").read_text()
    assert f"```python\n{(root / 'runtime/architectures/starcoder2.py').read_text()}```" in page
    table = page.partition("## When")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+\.py)`", table)
    assert named
    for name in named:
        assert (root / "runtime/architectures" / name).exists(), name


def test_an_architecture_is_declared_once():
    with pytest.raises(RuntimeError, match="'llama' is declared twice"):
        architecture("llama")(lambda decoder: None)


def test_attention_to_chosen_positions_is_on_kernels_in_all_layers_or_in_none():
    """Layers without an indexer take over the choice of a layer that has one, on the same path."""
    context = Context(torch.device("cpu"))

    def made(branch, context):
        if branch.layer == 1 and isinstance(branch.module, MLA):
            raise Slow("this layer has another type")
        return branch

    with load_model(shared("golden/convert/glm_moe_dsa/expected-f32.gguf")) as model:
        branches = placed(model.network.blocks)
        assert sum(isinstance(x.module, MLA) for x in branches) > 2
        found = choose_all(dict.fromkeys(PROMPT, made), branches, context)
        for branch, executor in zip(branches, found, strict=True):
            assert (executor is None) == isinstance(branch.module, MLA)
    reasons = {why: layers for (kind, why, _), layers in context.slow.items() if kind == "MLA"}
    assert reasons["this layer has another type"] == [1]
    assert 1 not in reasons["positions are chosen on the reference path"]

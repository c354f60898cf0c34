"""Architectures that run, and their paths: the declarations agree with the networks that are
built.
"""

from __future__ import annotations

import pytest
from iqforge.cli import main
from iqforge.errors import ArchitectureError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.values import string
from iqforge.runtime.architectures import architecture
from iqforge.runtime.model import load_model
from iqforge.runtime.support import supported_architectures

from .shared import shared
from .tiny_model import write_gguf

MODELS = {"llama": ["llama", "mixtral"], "qwen3moe": ["qwen3_moe"]}


def test_every_architecture_says_how_it_runs():
    found = supported_architectures()
    assert list(found) == sorted(MODELS)
    for name, support in found.items():
        assert (support.architecture, support.cpu, support.gpu, support.tensor_parallel) == (
            name,
            True,
            True,
            False,
        )


def test_generate_names_an_architecture_that_cannot_run_before_its_tokenizer(tmp_path, capsys):
    """The vocabulary of such a file may need an unsupported tokenizer as well."""
    keys = {
        "general.architecture": string("gemma3"),
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("nothing-known"),
    }
    with open_gguf(shared("golden/convert/llama/expected-f32.gguf")) as source:
        path = write_gguf(tmp_path / "gemma.gguf", source, metadata=keys)
    assert main(["generate", "--device", "cpu", "-m", str(path), "-p", "a", "-n", "1"]) == 1
    told = capsys.readouterr().err
    assert "architecture 'gemma3' cannot run yet; the runtime supports llama, qwen3moe" in told
    assert "tokenizer" not in told
    with pytest.raises(ArchitectureError, match="'gemma3' cannot run yet"):
        load_model(path)


def test_an_architecture_is_declared_once():
    with pytest.raises(RuntimeError, match="'llama' is declared twice"):
        architecture("llama")(lambda decoder: None)

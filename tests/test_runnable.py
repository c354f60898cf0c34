"""A conversion says what the runtime cannot run."""

from __future__ import annotations

import subprocess
import sys

import iqforge
import pytest
from iqforge.api import runnable
from iqforge.cli import main
from iqforge.errors import ArchitectureError, TokenizerError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.architectures import architectures

from .shared import shared
from .tiny_checkpoint import make_tiny_llama


def test_every_architecture_that_runs_is_listed():
    assert set(architectures()) == runnable.RUNNABLE


@pytest.fixture
def checkpoint(tmp_path):
    return make_tiny_llama(tmp_path / "hf", n_layers=1)


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_the_command_says_it_in_one_line(checkpoint, tmp_path, monkeypatch, capsys, extra):
    out = tmp_path / "a.gguf"
    assert main(["convert", str(checkpoint), "--outfile", str(out), *extra]) == 0
    assert "cannot run" not in capsys.readouterr().err
    monkeypatch.setattr(runnable, "RUNNABLE", frozenset({"gemma3"}))
    assert main(["convert", str(checkpoint), "--outfile", str(out), *extra]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "cannot run" in line]
    assert (
        len(lines) == 1 and "its runtime cannot run it: it has no architecture 'llama'" in lines[0]
    )
    if not extra:
        with open_gguf(out) as made:
            assert len(made.tensors) == 12


def test_blocks_for_multi_token_prediction_alone(tmp_path, caplog):
    folder = shared("golden/convert/glm4_moe/hf")
    iqforge.convert_model(folder, tmp_path / "a.gguf", mtp="only")
    assert "need the rest of the model" in caplog.text


def test_vocabularies_without_a_tokenizer(checkpoint, tmp_path, caplog, monkeypatch):
    def refuse(metadata):
        raise TokenizerError(f"model '{metadata['tokenizer.ggml.model'].data}' is not known")

    monkeypatch.setattr(runnable.Tokenizer, "from_metadata", refuse)
    iqforge.convert_model(checkpoint, tmp_path / "a.gguf")
    assert "it has no tokenizer for this vocabulary: model 'gpt2' is not known" in caplog.text
    caplog.clear()
    iqforge.convert_model(checkpoint, tmp_path / "b.gguf", vocab_only=True)
    assert "cannot run" not in caplog.text


def test_a_vocabulary_alone(checkpoint, tmp_path, capsys):
    vocabulary, copy = tmp_path / "v.gguf", tmp_path / "copy.gguf"
    iqforge.convert_model(checkpoint, vocabulary, vocab_only=True)
    with pytest.raises(ArchitectureError, match="v.gguf: has no tensors"):
        iqforge.load_model(vocabulary)
    assert main(["quantize", str(vocabulary), str(copy), "Q8_0"]) == 0
    assert f"written to {copy}\n" in capsys.readouterr().out and copy.exists()


def test_torch_is_not_imported_for_it(checkpoint, tmp_path):
    code = (
        "import sys, iqforge; iqforge.convert_model(sys.argv[1], sys.argv[2]);"
        " sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "a.gguf")]
    assert subprocess.run(command, timeout=600).returncode == 0

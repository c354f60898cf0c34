"""Every golden checkpoint through convert, imatrix, quantize, perplexity and generate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from iqforge.cli import main

from .golden import CASES, WITHOUT_LOGITS
from .shared import shared
from .tiny_checkpoint import PROSE

TYPES = {"gpt_oss_mxfp4": "MXFP4"}  # its experts stay as they are; Q8_0 for the others
APPENDS_EOS = "tok_bpe_pairs"


@pytest.fixture
def run(capsys) -> Callable[..., str]:
    """Run a command and return what it printed."""

    def run(*arguments: object) -> str:
        code = main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        assert code == 0, told.err
        return told.out + told.err

    return run


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *WITHOUT_LOGITS) if case != APPENDS_EOS]
)
def test_commands(case, tmp_path, run):
    text = tmp_path / "text.txt"
    text.write_text(PROSE)
    f32, matrix, small = (tmp_path / name for name in ("a.gguf", "a.imatrix", "b.gguf"))
    told = run("convert", shared(f"golden/convert/{case}/hf"), "--outfile", f32, "--outtype", "f32")
    assert "cannot run" not in told
    chunks = ("-f", text, "-c", 32, "--chunks", 3, "--device", "cpu")
    run("imatrix", "-m", f32, "-o", matrix, *chunks)
    run("quantize", "--imatrix", matrix, f32, small, TYPES.get(case, "Q8_0"))
    found = {}
    for path in (f32, small):
        told = run("perplexity", "-m", path, *chunks)
        found[path] = float(re.search(r"PPL = ([\d.]+)", told)[1])
        run("generate", "-m", path, "-p", "A model", "-n", 4, "--device", "cpu")
    assert math.isfinite(found[f32]) and abs(math.log(found[small] / found[f32])) < 0.3


def test_a_model_that_appends_eos(tmp_path, run, capsys):
    """Its text cannot be cut into chunks; all else works."""
    checkpoint = shared(f"golden/convert/{APPENDS_EOS}/hf")
    text, f32, small = (tmp_path / name for name in ("text.txt", "a.gguf", "b.gguf"))
    text.write_text(PROSE)
    run("convert", checkpoint, "--outfile", f32, "--outtype", "f32")
    run("quantize", f32, small, "Q8_0")
    run("generate", "-m", small, "-p", "A model", "-n", 4, "--device", "cpu")
    for command in ("imatrix", "perplexity"):
        assert main([command, "-m", str(small), "-f", str(text), "-c", "32"]) == 1
        assert "appends EOS to its input" in capsys.readouterr().err

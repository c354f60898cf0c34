"""Latent attention with every type of cache, and in commands."""

from __future__ import annotations

import json
from dataclasses import replace

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import UsageError
from iqforge.runtime.commands.flags import model_notes
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.weights.switches import Switches

from .latent_models import CASES, golden, in_pieces
from .shared import shared
from .tiny_cases import CASES as TINY
from .tiny_cases import SMALL
from .tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A model whose latent vectors begin within a block of the Hadamard transform: 32 + 96."""
    folder = tmp_path_factory.mktemp("turned")
    sizes = replace(SMALL, rotated=32, kv_rank=96)
    tiny = make_tiny_model(TINY["deepseek_v3"], sizes, folder / "hf")
    path = folder / "f32.gguf"
    iqforge.convert_model(tiny.folder, path, "f32")
    with load_model(path) as model:
        yield model, tiny.tokens


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", CACHE_TYPES)
def test_every_type_of_cache(turned, name, hadamard):
    """Naive, absorbed, in a state and without one."""
    model, tokens = turned
    bound = {"f32": 1e-4, "f16": 0.01, "bf16": 0.1}.get(name, 1.0)
    settings, exact = CacheSettings(name, hadamard_k=hadamard), model.forward(tokens)
    found = []
    for mla in (0, 1):
        with load_model(model.source.path, cache=settings, switches=Switches(mla=mla)) as other:
            found += [other.forward(tokens), in_pieces(other, tokens, [30, 5, 1, 4], settings)]
    for one in found:  # an expert that another rounding chooses changes a row
        assert (one - exact).abs().amax(1).median() < bound
        assert (one - found[0]).abs().amax(1).median() < max(1e-4, bound / 10)
    assert name == "f32" or not torch.equal(found[0], exact)
    turns = hadamard and CACHE_TYPES[name].is_quantized
    assert model.new_state(8, settings).layers[0].rows.hadamard_k == (128 if turns else 0)


@pytest.mark.parametrize("fast", [False, True])
def test_flags_that_kernels_do_not_follow_are_noted(turned, monkeypatch, fast):
    monkeypatch.setattr(Model, "is_fast", fast)
    switches = Switches(mla=1, attention_buffer=64)
    with load_model(turned[0].source.path, switches=switches) as model:
        assert [flag for flag, _ in model_notes(model)] == (["-mla", "-amb"] if fast else [])


@pytest.mark.parametrize("name", CASES)
def test_hadamard_blocks_that_do_not_fit_are_refused(name):
    with (
        load_model(golden(name)) as model,
        pytest.raises(UsageError, match="no Hadamard transform|blocks of 32"),
    ):
        model.new_state(8, CacheSettings("q8_0", hadamard_k=True))


def run(*words) -> None:
    assert main([str(word) for word in words]) == 0


def test_commands(tmp_path, capsys):
    """Convert, collect, quantize, measure and generate."""
    text = tmp_path / "text.txt"
    text.write_bytes(shared("text/wiki.test.txt").read_bytes()[:9000])
    f32, small, imatrix = (tmp_path / name for name in ("f32.gguf", "q4_0.gguf", "x.gguf"))
    on_text = ("-f", text, "-c", 64, "--chunks", 4, "--device", "cpu")
    run("convert", shared("models/mini-deepseek"), "--outfile", f32, "--outtype", "f32")
    run("imatrix", "-m", f32, "-o", imatrix, *on_text)
    run("quantize", "--imatrix", imatrix, f32, small, "Q4_0")
    told = capsys.readouterr()
    assert "did not find" not in told.err

    def perplexity(*words) -> float:
        run("perplexity", *on_text, *words)
        return float(capsys.readouterr().out.split("PPL = ")[1].split()[0])

    plain = perplexity("-m", f32)
    assert abs(perplexity("-m", f32, "-mla", 1) / plain - 1) < 1e-5
    assert abs(perplexity("-m", f32, "-ctk", "q8_0") / plain - 1) < 0.02
    assert 0.9 < perplexity("-m", small) / plain < 1.2
    generate = ("generate", "--device", "cpu", "-p", "The capital of", "-n", 8, "--temp", 0)
    run(*generate, "-m", small)
    assert capsys.readouterr().out.startswith("The capital of")
    run(*generate, "-m", f32, "-mla", 0)
    naive = capsys.readouterr()
    run(*generate, "-m", f32, "-mla", 1, "--dsa", "off", "-ctv", "q8_0")
    absorbed = capsys.readouterr()
    assert naive.out == absorbed.out and "note" not in naive.err
    assert "note: --dsa changes nothing here" in absorbed.err
    assert "note: -ctv changes nothing here: latent attention keeps no values" in absorbed.err
    run(*generate, "-m", f32, "-ctk", "q8_0", "-vhad")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "-vhad" in line]
    assert line.startswith("note: -vhad changes nothing here: latent attention keeps no values")


def test_bench_has_both_forms(capsys):
    path = golden("deepseek_v3")
    words = ("--device", "cpu", "-p", 8, "-n", 2, "-r", 1, "-mla", "0,1", "-o", "json")
    run("bench", "-m", path, *words)
    rows = json.loads(capsys.readouterr().out)
    assert [row["mla_attn"] for row in rows] == [0, 0, 1, 1]
    with load_model(path) as model:
        # For each of 4 heads and 11 positions: a key of 24 + 16 and a value of 16.
        assert model.network.blocks[0].mixer.flop(10, 1) == 2 * 11 * 4 * (40 + 16)

"""Quantizing with calibration texts, layer by layer."""

from __future__ import annotations

import hashlib
import json
import os

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import OutputError, ResumeError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.imatrix.moments.layers import LayerMoments
from iqforge.imatrix.moments.lookup import moments_of
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.texts import Text
from iqforge.runtime.model import load_model

from .broken_runs import BreakAfter
from .imatrices import N_CTX, tiny_llama_file
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe
from .tiny_model import write_gguf

TEXT = PROSE * 3
FULL = pytest.mark.full
OPTIONS = {"calibrate_chunks": 10, "calibrate_ctx": N_CTX, "pure": True, "device": "cpu"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama_file(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_tiny_qwen3moe(folder / "hf", n_experts=4, n_layers=2)
    return folder / "hf"


@pytest.fixture(scope="module")
def moe(checkpoint):
    with CheckpointSource(open_checkpoint(checkpoint)) as source:
        return write_gguf(checkpoint.parent / "moe.gguf", source)


@pytest.fixture(params=["llama", pytest.param("moe", marks=FULL)])
def model(request):
    return request.getfixturevalue(request.param)


def decoded(source, name: str) -> np.ndarray:
    info = source.tensor(name)
    rows = np.array(source.read_rows(info, 0, info.n_rows))
    return iqforge.decode(info.type, rows, info.n_cols)


def test_moments_of_layers_are_those_of_a_file(model, tmp_path):
    """Which layers are collected changes nothing."""
    options = HessianOptions(n_ctx=N_CTX, chunks=10)
    texts = [Text(TEXT, "a"), Text(TEXT[: len(TEXT) // 2] + "!", "b")]
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text.content + "\n")
    file = iqforge.collect_hessian(model, paths, tmp_path / "h.safetensors", n_ctx=N_CTX, chunks=5)
    with load_model(model) as opened:
        last = len(opened.network.blocks) - 1
    for wanted in (set(range(last + 1)), {last}):
        with load_model(model) as opened:
            layers = LayerMoments(opened, texts, options, str(tmp_path))
            assert layers.tokens == [5 * N_CTX, 5 * N_CTX]
            assert layers.inputs == file.inputs
            layers.wanted |= wanted
            layers.needed.update(wanted)
            for number in sorted(wanted):
                made = layers.layer(number)
                for one in made.inputs.values():
                    for fold in ("fit", "hold"):
                        counts = file.counts(one.name, fold)
                        assert np.array_equal(made.counts(one.name, fold), counts)
                        for index in np.flatnonzero(counts):
                            theirs = file.matrix(one.name, fold, int(index))
                            scale = np.abs(theirs).max()
                            mine = made.matrix(one.name, fold, int(index))
                            np.testing.assert_allclose(mine / scale, theirs / scale, atol=1e-5)
                layers.done(number)
                with pytest.raises(iqforge.IqforgeError, match="dropped already"):
                    layers.layer(number)
            layers.close()


def test_every_tensor_is_rounded_better_than_without(model, tmp_path):
    """The held-out error is about half that of the search, in every tensor."""
    made, plain = tmp_path / "made.gguf", tmp_path / "plain.gguf"
    iqforge.quantize_model(model, plain, "Q4_0", pure=True)
    iqforge.quantize_model(model, made, "Q4_0", calibrate=TEXT, **OPTIONS)
    file = iqforge.collect_hessian(model, TEXT, tmp_path / "h.safetensors", n_ctx=N_CTX, chunks=10)
    ratios = []
    with open_gguf(model) as source, open_gguf(plain) as other, open_gguf(made) as mine:
        for info in source.tensors:
            found = moments_of(file, info.name, info.shape) if len(info.shape) > 1 else None
            if found is None or not mine.tensor(info.name).type.is_quantized:
                continue
            errors = []
            for one in (mine, other):
                rest = decoded(one, info.name) - decoded(source, info.name)
                rest = rest.reshape(-1, *info.shape[-2:]).astype(np.float64)
                held = [(x, found.hold(index)) for index, x in enumerate(rest)]
                errors.append(sum(float(((x @ h) * x).sum()) for x, h in held if h is not None))
            ratios.append(errors[0] / errors[1])
    assert len(ratios) >= 7 and max(ratios) < 1 and np.mean(ratios) < 0.8


def test_threads_change_nothing_and_keys_name_texts(model, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    paths, used = [], []
    real = LayerMoments._run

    def run(self, number):
        used.append(torch.get_num_threads())  # products of torch depend on it
        real(self, number)

    monkeypatch.setattr(LayerMoments, "_run", run)
    before = torch.get_num_threads()
    for threads in (1, 3):
        paths.append(tmp_path / f"{threads}.gguf")
        iqforge.quantize_model(
            model, paths[-1], "Q4_0", calibrate=[TEXT, TEXT + "!"], threads=threads, **OPTIONS
        )
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(used) >= 2 and set(used) == {os.cpu_count()} and torch.get_num_threads() == before
    with open_gguf(paths[0]) as made:
        texts = json.loads(made.metadata["quantize.hessian.texts"].data)
        settings = json.loads(made.metadata["quantize.hessian.rounding"].data)
    said = [one for one in caplog.messages if one.startswith("calibrating on ")]
    assert len(said) == 2 and f"{2 * 5 * N_CTX:,} tokens" in said[0] and "up to " in said[0]
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (TEXT, TEXT + "!")]
    assert texts == [[one, 5 * N_CTX] for one in hashes]
    chosen = {"n_ctx": N_CTX, "refine": True, "shrink": None, "couple_rows": True, "stretch": True}
    assert settings == chosen


@pytest.mark.parametrize("after", [9, *(pytest.param(n, marks=FULL) for n in (1, 4, 14))])
def test_an_interrupted_run_resumes_to_the_same_bytes(moe, tmp_path, after):
    """Layers whose tensors are finished are run again, but not collected."""
    keywords = {"calibrate": TEXT, "hessian_shrink": 0.5, "refine": False} | OPTIONS
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    uninterrupted = BreakAfter(-1)
    iqforge.quantize_model(moe, whole, "Q4_0", progress=uninterrupted, **keywords)
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(moe, out, "Q4_0", progress=BreakAfter(after), **keywords)
    with pytest.raises(ResumeError, match="second moments"):
        iqforge.quantize_model(moe, out, "Q4_0", **(keywords | {"calibrate": TEXT + "!"}))
    resumed = BreakAfter(-1)
    iqforge.quantize_model(moe, out, "Q4_0", progress=resumed, **keywords)
    assert resumed.resumed and out.read_bytes() == whole.read_bytes()
    assert resumed.said == uninterrupted.said
    assert any("no second moments of these inputs" in line for line in resumed.said)


def test_a_checkpoint_gives_what_its_file_gives(checkpoint, moe, tmp_path):
    """Presets with a mix, too, and types that second moments do not guide."""
    made = []
    for src in (checkpoint, moe):
        out = tmp_path / f"{len(made)}.gguf"
        options = OPTIONS | {"pure": False, "custom_q": "attn_k=Q8_0"}
        iqforge.quantize_model(src, out, "Q4_0", calibrate=TEXT, provenance=False, **options)
        with open_gguf(out) as source:
            made.append({t.name: (t.type.name, decoded(source, t.name)) for t in source.tensors})
    assert made[0].keys() == made[1].keys()
    for name, (type, values) in made[0].items():
        assert made[1][name][0] == type, name
        np.testing.assert_array_equal(made[1][name][1], values, err_msg=name)


@FULL
def test_several_outputs_are_what_each_is_alone(llama, tmp_path):
    both = [(tmp_path / "a.gguf", "Q4_0"), (tmp_path / "b.gguf", "Q5_0")]
    iqforge.quantize_models(llama, both, calibrate=TEXT, **OPTIONS)
    for path, type in both:
        alone = tmp_path / f"alone-{type}.gguf"
        iqforge.quantize_model(llama, alone, type, calibrate=TEXT, **OPTIONS)
        assert alone.read_bytes() == path.read_bytes()


def test_the_importance_matrix_of_the_texts_is_used(llama, tmp_path):
    """A type that second moments do not guide is searched with the diagonal, which a file gives."""
    out, other = tmp_path / "q.gguf", tmp_path / "other.gguf"
    options = OPTIONS | {"provenance": False}
    report = iqforge.quantize_model(llama, out, "Q8_KV", calibrate=TEXT, **options)
    assert any(tensor.weighted for tensor in report.tensors)
    made = iqforge.collect_hessian(llama, TEXT, tmp_path / "h.safetensors", n_ctx=N_CTX, chunks=10)
    iqforge.quantize_model(llama, other, "Q8_KV", hessian=made, provenance=False, pure=True)
    with open_gguf(out) as a, open_gguf(other) as b:
        for tensor in a.tensors:
            assert np.array_equal(decoded(a, tensor.name), decoded(b, tensor.name)), tensor.name


def test_command(llama, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "q.gguf"
    text.write_text(TEXT)
    flags = ["--calibrate", str(text), "--calibrate-chunks", "10", "--calibrate-ctx", str(N_CTX)]
    words = ["--pure", "--device", "cpu", "--validate", str(llama), str(out), "Q4_0"]
    assert main(["quantize", *flags, *words]) == 0
    shown = capsys.readouterr().out
    assert "shrunk by 0.75" in shown and "add --calibrate default" in shown
    assert "held-out error x 0." in shown and "validated: " in shown
    assert main(["quantize", *flags, "--hessian", str(text), *words]) == 1
    assert "exclude each other" in capsys.readouterr().err
    assert main(["quantize", *flags[2:], *words]) == 1
    assert "need texts (--calibrate)" in capsys.readouterr().err
    options = OPTIONS | {"calibrate": TEXT, "dry_run": True}
    with pytest.raises(UsageError, match="--no-estimate"):
        iqforge.quantize_model(llama, None, "Q4_0", estimate=True, **options)
    report = iqforge.quantize_model(llama, None, "Q4_0", **options)
    assert {tensor.planned.target.type.name for tensor in report.tensors} >= {"Q4_0"}


@pytest.mark.parametrize("texts", [[], ()])
def test_no_text_is_an_error(llama, tmp_path, texts):
    with pytest.raises(UsageError, match="no calibration text"):
        iqforge.quantize_model(llama, tmp_path / "q.gguf", "Q4_0", calibrate=texts, **OPTIONS)
    with pytest.raises(UsageError, match="no text"):
        iqforge.collect_hessian(llama, texts, tmp_path / "h.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_before_the_work(llama, tmp_path):
    with pytest.raises(OutputError, match="no-folder"):
        iqforge.collect_hessian("missing.gguf", TEXT, tmp_path / "no-folder" / "h.safetensors")

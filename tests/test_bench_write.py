"""`bench --write`: models of random weights as files."""

from __future__ import annotations

import shutil

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import NotFoundError, OutputError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.bench.write import pieces, vocabulary


@pytest.mark.parametrize("spec", ["llama-tiny:Q4_K_R4", "qwen35-tiny:IQ4_K,attn_qkv=Q6_K"])
def test_a_written_model_is_the_one_that_is_measured(spec, tmp_path):
    done: list[int] = []
    path = iqforge.write_random_model(spec, tmp_path / "m.gguf", progress=done.append)
    source = SyntheticSource(spec)
    with open_gguf(path) as file:
        assert [(t.name, t.shape, t.type) for t in file.tensors] == [
            (t.name, t.shape, t.type) for t in source.tensors
        ]
        assert sum(done) == sum(tensor.n_bytes for tensor in source.tensors)
        for stored, made in zip(file.tensors, source.tensors, strict=True):
            rows = file.read_rows(stored, 0, stored.n_rows)
            assert np.array_equal(rows, source.read_rows(made, 0, made.n_rows))
    with iqforge.load_model(path, "cpu") as model, iqforge.random_model(spec, "cpu") as random:
        ids = [1, 5, 300, 7]
        assert torch.equal(model.forward(ids), random.forward(ids))
        assert model.tokenizer.decode(model.tokenizer.encode("a b")[1:]).strip() == "a b"


def test_large_tensors_are_written_in_pieces():
    source = SyntheticSource("llama-8b:IQ4_K_R4")
    tensor = next(t for t in source.tensors if t.name == "output.weight")
    sizes = [len(piece) for piece in pieces(source, tensor)]
    assert sum(sizes) == tensor.n_rows and len(sizes) > 10
    assert all(n % tensor.type.group_rows == 0 for n in sizes)
    assert max(sizes) * tensor.row_bytes <= 16 << 20


@pytest.mark.parametrize("n", [2, 259, 1000])
def test_vocabulary_has_as_many_tokens_as_asked_for(n):
    keys = vocabulary(n)
    texts = keys["tokenizer.ggml.tokens"].data
    assert len(set(texts)) == n
    assert all(len(keys[f"tokenizer.ggml.{x}"].data) == n for x in ("scores", "token_type"))


def test_command(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    assert main(["bench", "--synthetic", "llama-tiny:Q8_0", "--write", str(path)]) == 0
    assert "random weights" in capsys.readouterr().out
    with open_gguf(path) as file:
        assert file.metadata["general.architecture"].data == "llama"
    for wrong in (
        ["--write", str(path)],
        ["--write", str(path), "-m", str(path)],
        ["--write", str(path), "--synthetic", "llama-tiny:Q8_0", "--synthetic", "llama-8b:Q8_0"],
    ):
        assert main(["bench", *wrong]) == 1
        assert "--write takes one model" in capsys.readouterr().err


def test_errors_leave_no_file(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    with pytest.raises(NotFoundError, match="no shape 'nothing'"):
        iqforge.write_random_model("nothing:Q8_0", path)
    with pytest.raises(UsageError, match="a type is needed"):
        iqforge.write_random_model("llama-tiny", path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: usage._replace(free=1000))
    with pytest.raises(OutputError, match="free"):
        iqforge.write_random_model("llama-tiny:Q8_0", path)
    monkeypatch.undo()

    def interrupt(n: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iqforge.write_random_model("llama-tiny:Q8_0", path, progress=interrupt)
    assert not list(tmp_path.iterdir())

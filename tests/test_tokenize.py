"""`iqforge tokenize`: the flags and the output of llama-tokenize."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import iqforge
import pytest
from iqforge.cli import main
from iqforge.formats.gguf.reader import open_gguf

from .tiny_checkpoint import BOS, make_tiny_llama
from .tiny_model import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("tokenize"), n_layers=1)
    path = folder / "model.gguf"
    iqforge.convert_model(folder, path)
    return path


def run(capsys, *words: object) -> tuple[int, str, str]:
    try:
        status = main(["tokenize", *map(str, words)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_tokens_line_by_line(model: Path, capsys):
    tokenizer = iqforge.load_tokenizer(model)
    status, out, err = run(capsys, "-m", model, "-p", "the é", "--show-count")
    ids = tokenizer.encode("the é")
    assert status == 0 and err == ""
    lines = out.splitlines()
    assert lines[0] == f"{tokenizer.special.bos:6d} -> '{BOS}'"
    assert lines[-1] == f"Total number of tokens: {len(ids)}"
    assert lines[-3:-1] == [
        f"{ids[-2]:6d} -> '<c3>' (utf-8 decode failure)",
        f"{ids[-1]:6d} -> '<a9>' (utf-8 decode failure)",
    ]


def test_ids(model: Path, capsys, tmp_path: Path, monkeypatch):
    tokenizer = iqforge.load_tokenizer(model)

    def ids(*words: object) -> list[int]:
        status, out, err = run(capsys, "-m", model, "--ids", *words)
        assert status == 0 and err == ""
        return eval(out)

    bos = tokenizer.special.bos
    plain = tokenizer.encode("a\nb", add_special=False)
    assert ids("-p", r"a\nb") == [bos, *plain]
    assert ids("-p", r"a\nb", "--no-bos") == plain
    assert ids("-p", r"a\nb", "--no-escape", "--no-bos") == tokenizer.encode(
        r"a\nb", add_special=False
    )
    marked = tokenizer.encode(f"x{BOS}", add_special=False, parse_special=True)
    assert marked[-1] == bos and ids("-p", f"x{BOS}", "--no-bos") == marked
    as_text = ids("-p", f"x{BOS}", "--no-bos", "--no-parse-special", "--log-disable")
    assert bos not in as_text and tokenizer.decode(as_text) == f"x{BOS}"
    (tmp_path / "text").write_text("a\nb\n")
    assert ids("-f", tmp_path / "text") == tokenizer.encode("a\nb\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    assert ids("--stdin") == tokenizer.encode("a\nb\n")
    assert ids("-p", "") == [bos]


def test_a_checkpoint_folder(model: Path, capsys):
    words = ["--ids", "-p", "the place of every byte"]
    assert run(capsys, "-m", model.parent, *words) == run(capsys, "-m", model, *words)


def test_errors(model: Path, capsys, tmp_path: Path):
    for words in ([], ["-p", "a", "--stdin"], ["-p", "a", "-f", "b"]):
        status, _, err = run(capsys, "-m", model, *words)
        assert status == 1 and "exactly one of -p TEXT, -f FILE and --stdin" in err
    status, _, err = run(capsys, "-m", model, "-f", tmp_path / "none")
    assert status == 1 and "no such text file" in err
    (tmp_path / "bytes").write_bytes(b"a\xff")
    status, _, err = run(capsys, "-m", model, "-f", tmp_path / "bytes")
    assert status == 1 and "at byte 1: the text is not UTF-8" in err
    assert run(capsys, "-p", "a")[0] == 2


def test_a_file_without_a_vocabulary(model: Path, capsys, tmp_path: Path):
    with open_gguf(model) as file:
        keys = {key: None for key in file.metadata if key.startswith("tokenizer.")}
        path = write_gguf(tmp_path / "none.gguf", file, metadata=keys)
    status, _, err = run(capsys, "-m", path, "-p", "a")
    assert status == 1 and "none.gguf: metadata key 'tokenizer.ggml.model' is missing" in err

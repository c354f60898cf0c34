"""The calibration text that comes with the package."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
from iqforge.imatrix import default_texts as texts_module
from iqforge.imatrix.default_texts import KINDS, default_texts
from iqforge.imatrix.files.load import load_imatrix

from .imatrices import tiny_llama_file
from .shared import shared

FOLDER = Path(iqforge.__file__).parent / "imatrix" / "calibration"


def test_sources_name_every_file_and_its_size():
    said = (FOLDER / "SOURCES.md").read_text()
    assert {path.name for path in FOLDER.glob("*.xz")} == {f"{kind}.txt.xz" for kind in KINDS}
    for text, name in default_texts():
        kind = name.removeprefix("default/")
        assert f"| `{kind}` | {len(text.encode()):,} |" in said
        assert text.endswith("\n") and "\r" not in text and "\0" not in text


def test_it_holds_none_of_the_texts_that_results_are_measured_on():
    folder = shared("text")
    whole = "\n".join(text for text, _ in default_texts())
    lines = {line for line in whole.split("\n") if len(line) > 60}
    for path in folder.glob("*.txt"):
        assert not lines & set(path.read_text().split("\n")), path.name


def test_an_importance_matrix_and_second_moments_take_it_by_name(tmp_path, monkeypatch):
    # Whole texts are split into tokens before the first chunks are taken, which takes long.
    starts = [(text[:10_000], name) for text, name in default_texts()]
    monkeypatch.setattr(texts_module, "default_texts", lambda: starts)
    tiny_file = tiny_llama_file(tmp_path)
    iqforge.collect_imatrix(tiny_file, "default", tmp_path / "i.gguf", chunks=2, n_ctx=32)
    made = load_imatrix(tmp_path / "i.gguf")
    assert made.datasets == tuple(f"default/{kind}" for kind in KINDS)
    assert made.chunk_count == 2 * len(KINDS)
    moments = iqforge.collect_hessian(
        tiny_file, "default", tmp_path / "h.safetensors", chunks=2, n_ctx=32
    )
    assert [text["tokens"] for text in moments.texts] == [64] * len(KINDS)
    assert all(np.isfinite(moments.diagonal(name, "fit")).all() for name in moments.inputs)

"""Keys that record the origin of a quantized file: present, the same for the same weights, and
different for others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.formats.codecs.codec import decode, encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.quantize.plan.changes import Changes
from iqforge.quantize.plan.recipe import Recipe
from iqforge.quantize.run.provenance import (
    IMATRIX_KEY,
    RECIPE_KEY,
    SAMPLES,
    SOURCE_KEY,
    VERSION_KEY,
    recipe_text,
    source_fingerprint,
)

from .tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return iqforge.convert_model(
        make_tiny_llama(folder / "hf", n_layers=1), folder / "tiny.gguf", outtype="bf16"
    )


@pytest.fixture(scope="module")
def imatrix(bf16) -> Path:
    with open_gguf(bf16) as source:
        entries = {
            t.name: Entry(np.ones((1, t.n_cols)), np.array([9]))
            for t in source.tensors
            if len(t.shape) > 1
        }
    save_imatrix(Imatrix(entries, chunk_count=3, datasets=("text.txt",)), bf16.parent / "some.dat")
    return bf16.parent / "some.dat"


def keys_of(path: Path) -> dict[str, object]:
    with open_gguf(path) as file:
        return {
            key: value.data for key, value in file.metadata.items() if key.startswith("quantize.")
        }


def test_keys_of_a_file(bf16, imatrix, tmp_path):
    out = tmp_path / "q.gguf"
    flags = ["--imatrix", str(imatrix), "--custom-q", "attn=q6_K", "--leave-output-tensor"]
    assert main(["quantize", *flags, str(bf16), str(out), "Q4_K"]) == 0
    found = keys_of(out)
    assert found[VERSION_KEY] == iqforge.__version__
    said = json.loads(found[RECIPE_KEY])
    assert (
        said["type"] == "Q4_K"
        and said["leave_output_tensor"] is True
        and "attn=q6_K" in said["custom_q"]
        and "pure" not in said
    )
    assert found[IMATRIX_KEY] == hashlib.sha256(imatrix.read_bytes()).hexdigest()
    assert (
        found["quantize.imatrix.file"] == "some.dat"
        and found["quantize.imatrix.dataset"] == "text.txt"
    )
    with open_gguf(bf16) as source:
        assert (
            found[SOURCE_KEY] == source_fingerprint(source)
            and found["quantize.imatrix.entries_count"] > 5
        )
    assert str(tmp_path) not in str(found) and str(bf16.parent) not in str(found)


def test_the_folder_of_the_inputs_changes_no_byte(bf16, imatrix, tmp_path):
    (tmp_path / "else").mkdir()
    for file in (bf16, imatrix):
        (tmp_path / "else" / file.name).write_bytes(file.read_bytes())
    iqforge.quantize_model(bf16, tmp_path / "a.gguf", "Q4_K", imatrix)
    iqforge.quantize_model(
        tmp_path / "else" / bf16.name, tmp_path / "b.gguf", "Q4_K", tmp_path / "else" / imatrix.name
    )
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_without_provenance_only_the_reference_s_keys(bf16, imatrix, tmp_path):
    assert (
        main(
            [
                "quantize",
                "--no-provenance",
                "--imatrix",
                str(imatrix),
                str(bf16),
                str(tmp_path / "q.gguf"),
                "Q4_K",
            ]
        )
        == 0
    )
    known = {
        f"quantize.imatrix.{what}" for what in ("file", "dataset", "entries_count", "chunks_count")
    }
    assert keys_of(tmp_path / "q.gguf").keys() == known
    assert keys_of(tmp_path / "q.gguf")["quantize.imatrix.file"] == str(imatrix)


def test_quantizing_again_replaces_the_record(bf16, imatrix, tmp_path):
    iqforge.quantize_model(bf16, tmp_path / "a.gguf", "Q8_0", imatrix)
    iqforge.quantize_model(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q4_0", allow_requantize=True)
    first, second = keys_of(tmp_path / "a.gguf"), keys_of(tmp_path / "b.gguf")
    assert first[SOURCE_KEY] != second[SOURCE_KEY] and json.loads(second[RECIPE_KEY]) == {
        "allow_requantize": True,
        "type": "Q4_0",
    }
    assert second[IMATRIX_KEY] == first[IMATRIX_KEY], (
        "the older run's importance matrix is still true of these weights"
    )
    iqforge.quantize_model(
        tmp_path / "a.gguf",
        tmp_path / "c.gguf",
        "Q4_0",
        Imatrix({"output.weight": Entry(np.ones((1, 256)), np.array([1]))}),
        allow_requantize=True,
    )
    assert IMATRIX_KEY not in keys_of(tmp_path / "c.gguf")
    iqforge.quantize_model(
        tmp_path / "a.gguf", tmp_path / "d.gguf", "Q4_0", allow_requantize=True, provenance=False
    )
    assert not {VERSION_KEY, RECIPE_KEY, SOURCE_KEY} & keys_of(tmp_path / "d.gguf").keys()


def test_recipe_records_differences_from_the_defaults():
    assert recipe_text(Recipe("IQ4_K")) == '{"type": "IQ4_K"}'
    assert (
        recipe_text(Recipe("IQ4_K", custom_q=["a=q4_0"], role_types={"attn_v": "q6_K"}, pure=True))
        == '{"custom_q": ["a=q4_0"], "pure": true, "role_types": {"attn_v": "q6_K"}, "type":'
        ' "IQ4_K"}'
    )
    assert (
        recipe_text(
            Recipe("IQ4_K", strict=True), Changes(prune_layers=[3], exclude_weights=["attn"])
        )
        == '{"exclude_weights": ["attn"], "prune_layers": [3], "type": "IQ4_K"}'
    )
    assert (
        recipe_text(Recipe("IQ4_K"), Changes(hide_imatrix=True, include_weights=["ffn"]))
        == '{"type": "IQ4_K"}'
    )


def write(path: Path, kind: str, x: np.ndarray) -> Path:
    tensor = TensorInfo("blk.0.ffn_up.weight", x.shape, ggml_type(kind))
    with GGUFWriter(path, {"general.architecture": string("llama")}, [tensor]) as sink:
        sink.write(tensor, encode_float(kind, x))
    return path


def fingerprint(path: Path, threads: int = 1) -> str:
    with open_gguf(path) as source:
        return source_fingerprint(source, threads)


def test_fingerprint_is_of_the_values(tmp_path, bf16):
    x = np.random.default_rng(1).standard_normal((5 * SAMPLES, 64)).astype(np.float32)
    x = decode("BF16", encode_float("BF16", x), 64)
    first = fingerprint(write(tmp_path / "a.gguf", "BF16", x))
    assert len(first) == 64 and fingerprint(write(tmp_path / "b.gguf", "F32", x)) == first, (
        "the same values in another type"
    )
    assert fingerprint(write(tmp_path / "c.gguf", "F32", x.reshape(2, -1, 64))) != first, (
        "another shape"
    )
    x[5, 3] += 1  # in a row that the fingerprint reads
    assert fingerprint(write(tmp_path / "d.gguf", "F32", x)) != first
    assert fingerprint(bf16, 1) == fingerprint(bf16, 3)


def test_fingerprint_of_a_small_tensor_covers_all_of_it(tmp_path):
    x = np.zeros((SAMPLES, 32), dtype=np.float32)
    seen = {fingerprint(write(tmp_path / "a.gguf", "F32", x))}
    for row in range(SAMPLES):
        x[:] = 0
        x[row, row] = 1
        seen.add(fingerprint(write(tmp_path / "a.gguf", "F32", x)))
    assert len(seen) == SAMPLES + 1


def test_the_values_of_interleaved_rows(tmp_path, bf16):
    iqforge.quantize_model(bf16, tmp_path / "q.gguf", "IQ4_NL", pure=True)
    iqforge.repack_model(tmp_path / "q.gguf", tmp_path / "r.gguf")
    with open_gguf(tmp_path / "r.gguf") as source:
        assert any(t.type.is_interleaved for t in source.tensors) and source_fingerprint(
            source
        ) == source_fingerprint(source, 2)
    assert keys_of(tmp_path / "q.gguf") == keys_of(tmp_path / "r.gguf"), (
        "repacking changes no weights"
    )

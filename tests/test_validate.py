"""Validation of files: sound files pass, and every kind of changed byte is found."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import MalformedFileError, ShapeError, ValidationError
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.quantize.report.validate import validate_tensors

from .imatrices import imatrix_of
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("hf"), n_layers=1)


@pytest.fixture(scope="module")
def bf16(checkpoint, tmp_path_factory) -> Path:
    return iqforge.convert_model(
        checkpoint, tmp_path_factory.mktemp("gguf") / "tiny.gguf", outtype="bf16"
    )


def damage(path: Path, tensor: str, at: int, value: bytes) -> None:
    with open_gguf(path) as file:
        _, offset = file.location(tensor)
    with open(path, "r+b") as file:
        file.seek(offset + at)
        file.write(value)


def faults(checked) -> dict[str, str]:
    return {one.tensor.name: one.fault for one in checked if one.fault}


@pytest.mark.parametrize("kind", ["IQ4_K", "Q4_0", "IQ4_K_R4", "BF16"])
def test_a_sound_file_has_the_errors_that_were_reported(bf16, checkpoint, tmp_path, kind):
    out, imatrix = tmp_path / "q.gguf", imatrix_of(bf16)
    report = iqforge.quantize_model(bf16, out, kind, imatrix, pure=True)
    with open_gguf(bf16) as source, open_gguf(out) as written:
        planned = [one.planned for one in report.tensors]
        checked = list(
            validate_tensors(
                written, source, planned, report.tensors, importance=imatrix.importance, threads=2
            )
        )
    assert not faults(checked) and len(checked) == len(report.tensors)
    for against in (bf16, checkpoint):
        for one, before in zip(iqforge.validate_model(out, against, imatrix), report.tensors):
            assert one.report.rmse in (before.rmse, 0.0) or (
                one.report.rmse,
                one.report.weighted_rmse,
            ) == pytest.approx((before.rmse, before.weighted_rmse), rel=1e-6)


def test_experts_and_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("iqforge.quantize.report.validate.PIECE_ELEMENTS", 4096)
    model = iqforge.convert_model(
        make_tiny_qwen3moe(tmp_path / "hf", n_experts=4), tmp_path / "m.gguf", outtype="f32"
    )
    imatrix = imatrix_of(model)
    report = iqforge.quantize_model(model, tmp_path / "q.gguf", "IQ3_K", imatrix, pure=True)
    for one, before in zip(
        iqforge.validate_model(tmp_path / "q.gguf", model, imatrix, threads=3), report.tensors
    ):
        assert not one.fault and (before.rmse is None) == (one.report.rmse is None)
        if before.rmse is not None:
            assert (
                one.report.rmse,
                one.report.weighted_rmse,
                one.report.largest_error,
            ) == pytest.approx((before.rmse, before.weighted_rmse, before.largest_error), rel=1e-6)


def test_a_changed_byte_is_found(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    report = iqforge.quantize_model(bf16, out, "Q8_0", pure=True)
    damage(out, "blk.0.ffn_up.weight", 34 * 100 + 7, b"\x7f")  # one number
    damage(out, "blk.0.attn_norm.weight", 8, b"\x12")  # kept
    with open_gguf(bf16) as source, open_gguf(out) as written:
        found = faults(
            validate_tensors(
                written, source, [one.planned for one in report.tensors], report.tensors
            )
        )
    assert found.keys() == {"blk.0.ffn_up.weight", "blk.0.attn_norm.weight"}
    assert (
        "the run reported" in found["blk.0.ffn_up.weight"]
        and "not those of the source" in found["blk.0.attn_norm.weight"]
    )
    assert main(["validate", str(out)]) == 0, "without its source every value is a number"
    assert main(["validate", str(out), "--against", str(bf16)]) == 1
    said = capsys.readouterr().out
    assert "1 with a fault" in said and "rel. rmse = " in said
    (line,) = (line for line in said.splitlines() if "FAULT" in line)
    assert "blk.0.attn_norm.weight" in line


def test_values_that_are_no_numbers_are_found(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    iqforge.quantize_model(bf16, out, "Q8_0", pure=True)
    # The scale of the third block of row 3 is NaN.
    damage(out, "blk.0.ffn_up.weight", 34 * (3 * 8 + 2), b"\x00\x7e")
    assert main(["validate", str(out)]) == 1
    said = capsys.readouterr().out
    assert (
        "nan at row 3, column 64" in said
        and "1 with a fault" in said
        and len(said.splitlines()) == 2
    )


def test_values_that_are_not_finite_may_stay_in_floats(tmp_path):
    tensors = [TensorInfo("blk.0.ffn_up.weight", (16, 256), ggml_type("F32"))]
    x = np.random.default_rng(1).standard_normal((16, 256)).astype(np.float32)
    x[3, 4] = np.nan
    with GGUFWriter(
        tmp_path / "m.gguf", {"general.architecture": string("llama")}, tensors
    ) as sink:
        sink.write(tensors[0], encode_float("F32", x))
    report = iqforge.quantize_model(tmp_path / "m.gguf", tmp_path / "h.gguf", "F16", pure=True)
    with open_gguf(tmp_path / "m.gguf") as source, open_gguf(tmp_path / "h.gguf") as written:
        assert not faults(
            validate_tensors(
                written, source, [one.planned for one in report.tensors], report.tensors
            )
        )
    assert faults(iqforge.validate_model(tmp_path / "h.gguf"))


def test_other_models_and_broken_files(bf16, tmp_path):
    other = iqforge.convert_model(
        make_tiny_llama(tmp_path / "hf", n_layers=2, n_ff=256), tmp_path / "other.gguf"
    )
    with pytest.raises(ShapeError, match="shape"):
        iqforge.validate_model(bf16, other)
    with pytest.raises(ShapeError, match="the source does not have this tensor"):
        iqforge.validate_model(
            iqforge.convert_model(
                make_tiny_llama(tmp_path / "hf2", n_layers=2), tmp_path / "two.gguf"
            ),
            bf16,
        )
    (tmp_path / "cut.gguf").write_bytes(bf16.read_bytes()[:-1000])
    with pytest.raises(MalformedFileError):
        iqforge.validate_model(tmp_path / "cut.gguf")


def test_a_run_that_validates(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    assert main(["quantize", "--validate", "--pure", str(bf16), str(out), "Q8_0"]) == 0
    said = capsys.readouterr().out
    assert "validated: 12 tensor(s)" in said and [p.name for p in tmp_path.iterdir()] == ["q.gguf"]


def test_a_byte_that_changes_on_the_way_to_the_disk(bf16, tmp_path, monkeypatch, capsys):
    """The file does not get its name, and the next run resumes from the sound part."""
    from iqforge.formats.gguf.writer import GGUFWriter as Writer

    whole, honest = tmp_path / "whole.gguf", Writer.write
    assert main(["quantize", "--pure", str(bf16), str(whole), "Q8_0"]) == 0

    def write_wrongly(self, tensor, data):
        if tensor.name == "blk.0.ffn_up.weight":
            data = np.array(data)
            data[3, 7] ^= 0x40
        honest(self, tensor, data)

    out = tmp_path / "q.gguf"
    monkeypatch.setattr(Writer, "write", write_wrongly)
    capsys.readouterr()
    assert main(["quantize", "--validate", "--pure", str(bf16), str(out), "Q8_0"]) == 1
    said = capsys.readouterr()
    assert "tensor 'blk.0.ffn_up.weight'" in said.err and "read back differently" in said.err
    (line,) = (line for line in said.out.splitlines() if "FAULT" in line)
    assert "blk.0.ffn_up.weight" in line and "the run reported" in line
    assert not out.exists() and out.with_name("q.gguf.part").exists()
    monkeypatch.setattr(Writer, "write", honest)
    assert main(["quantize", "--validate", "--pure", str(bf16), str(out), "Q8_0"]) == 0
    assert out.read_bytes() == whole.read_bytes() and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["q.gguf", "whole.gguf"]


def test_several_outputs_are_not_renamed_if_one_is_wrong(bf16, tmp_path, monkeypatch):
    from iqforge.quantize.report import validate

    honest = validate.validate_tensors

    def one_is_wrong(written, *arguments, **options):
        for checked in honest(written, *arguments, **options):
            yield (
                validate.Checked(checked.tensor, checked.report, "is invented")
                if written.path.endswith("b.gguf")
                else checked
            )

    monkeypatch.setattr(validate, "validate_tensors", one_is_wrong)
    outputs = [(tmp_path / "a.gguf", "Q8_0"), (tmp_path / "b.gguf", "Q4_0")]
    with pytest.raises(ValidationError, match="b.gguf.*token_embd.*is invented .12 tensors"):
        iqforge.quantize_models(bf16, outputs, pure=True, validate=True)
    assert not list(tmp_path.glob("*.gguf"))


def test_shards_and_changed_models(bf16, tmp_path, capsys):
    shards = iqforge.split_model(bf16, tmp_path / "split", max_tensors=5)
    assert (
        main(
            [
                "quantize",
                "--validate",
                "--keep-split",
                "--pure",
                str(shards[0]),
                str(tmp_path / "q.gguf"),
                "Q4_0",
            ]
        )
        == 0
    )
    assert (
        len(list(tmp_path.glob("q-*.gguf"))) == 3
        and "validated: 12 tensor(s)" in capsys.readouterr().out
    )
    model = iqforge.convert_model(
        make_tiny_qwen3moe(tmp_path / "hf", n_experts=4), tmp_path / "m.gguf"
    )
    for flags in (["--merge-gate-up"], ["--prune-layers", "0"]):
        words = ["--allow-requantize", "--pure", str(model), str(tmp_path / "c.gguf"), "Q4_0"]
        assert main(["quantize", "--validate", *flags, *words]) == 0, flags
    capsys.readouterr()
    assert (
        main(["quantize", "--validate", "--repack", str(model), str(tmp_path / "r.gguf"), "Q4_0"])
        == 1
    )
    assert "iqforge validate" in capsys.readouterr().err

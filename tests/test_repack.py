"""Repacking whole files: the reference's bytes, and back to the original ones."""

from __future__ import annotations

from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import OutputError, UsageError
from iqforge.formats.ftypes import FILE_TYPES
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import TYPES, ggml_type
from iqforge.formats.values import string, u32
from iqforge.quantize.run import repack
from iqforge.quantize.run.repack import interleaved_form, plan_repack, repacked_file_type

from .shared import shared

FORMS = [kind.name for kind in TYPES.values() if interleaved_form(kind)]


def model(
    path: Path,
    tensors: dict[str, tuple[tuple[int, ...], str]],
    preset: str = "IQ4_K",
    seed: int = 0,
) -> Path:
    """Write a file of random bytes, with correct sums in rows of Q8_KV."""
    infos = [TensorInfo(name, shape, ggml_type(kind)) for name, (shape, kind) in tensors.items()]
    metadata = {
        "general.architecture": string("llama"),
        "general.file_type": u32(FILE_TYPES[preset].number),
        "general.quantization_version": u32(2),
    }
    generator = np.random.default_rng(seed)
    with GGUFWriter(path, metadata, infos) as sink:
        for info in infos:
            data = generator.integers(0, 256, info.n_bytes, dtype=np.uint8)
            if info.type.name == "Q8_KV":
                rows = data.reshape(info.n_rows, -1)
                rows[:, 4:8] = (
                    rows[:, 8:].view(np.int8).sum(axis=1, dtype="<i4")[:, None].view(np.uint8)
                )
            sink.write(info, data)
    return path


def test_file_is_the_reference_s(tmp_path):
    plain, repacked = (
        shared(f"golden/tools/gguf/tiny-llama-untied.{name}.gguf")
        for name in ("Q8_0", "Q8_0_R8.repacked")
    )
    iqforge.repack_model(plain, tmp_path / "r.gguf")
    assert (tmp_path / "r.gguf").read_bytes() == repacked.read_bytes()
    iqforge.repack_model(repacked, tmp_path / "p.gguf", undo=True)
    assert (tmp_path / "p.gguf").read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("kind", FORMS)
def test_undo_gives_the_same_file(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(repack, "PIECE_BYTES", 20_000)
    preset = {"Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M", "Q5_K": "Q5_K_M", "IQ2_S": "IQ2_M"}.get(
        kind, kind
    )
    plain = model(
        tmp_path / "plain.gguf",
        {
            "token_embd.weight": ((32, 256), kind),
            "blk.0.ffn_up.weight": ((48, 512), kind),
            "blk.0.ffn_down_exps.weight": ((3, 16, 256), kind),
            "blk.0.attn_norm.weight": ((256,), "F32"),
            "blk.0.attn_k.weight": ((6, 256), kind),
        },
        preset,
    )
    for threads in (1, 2):
        report = iqforge.repack_model(plain, tmp_path / f"{threads}.gguf", threads=threads)
        iqforge.repack_model(
            tmp_path / f"{threads}.gguf",
            tmp_path / f"undone{threads}.gguf",
            undo=True,
            threads=threads,
        )
        assert (tmp_path / f"undone{threads}.gguf").read_bytes() == plain.read_bytes()
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "2.gguf").read_bytes()
    form = interleaved_form(ggml_type(kind))
    assert [t.planned.target.type for t in report.tensors] == [
        ggml_type(kind),
        form,
        form,
        ggml_type("F32"),
        ggml_type(kind),
    ]
    with open_gguf(plain) as before, open_gguf(tmp_path / "1.gguf") as after:
        name = "blk.0.ffn_down_exps.weight"
        rows = before.read_rows(before.tensor(name), 0, 48)
        assert np.array_equal(
            after.read_rows(after.tensor(name), 0, 48), iqforge.interleave(form, rows, 256)
        )
        assert (after.metadata["general.file_type"] != before.metadata["general.file_type"]) == (
            kind != "MXFP4"
        )


def test_tensors_that_stay_are_named():
    def planned(name, shape, kind, **options):
        (plan,) = plan_repack([TensorInfo(name, shape, ggml_type(kind))], **options)
        return plan.target.type.name, plan.note

    up = "blk.0.ffn_up.weight"
    assert planned(up, (8, 256), "IQ4_K") == ("IQ4_K_R4", "")
    assert planned(up, (6, 256), "IQ4_K") == ("IQ4_K", "6 rows are not a multiple of 4")
    assert planned(up, (2, 6, 256), "IQ4_K") == ("IQ4_K", "6 rows are not a multiple of 4")
    assert planned(up, (16, 255), "BF16") == ("BF16", "row length 255 is not a multiple of 2")
    assert planned("token_embd.weight", (8, 256), "IQ4_K") == ("IQ4_K", "looked up by row")
    assert planned(up, (8, 256), "IQ6_K") == ("IQ6_K", "IQ6_K has no interleaved form")
    assert planned(up, (8, 256), "F32") == ("F32", "") and planned(up, (8, 256), "IQ4_K_R4") == (
        "IQ4_K_R4",
        "",
    )
    assert planned(up, (8, 256), "Q4_0") == ("Q4_0_R8", "") and planned(
        up, (8, 256), "Q4_0_8_8", undo=True
    ) == ("Q4_0", "")
    assert planned(up, (8, 256), "IQ1_S_R4", undo=True) == (
        "IQ1_S_R4",
        "IQ1_S_R4 has no plain form",
    )
    assert planned(up, (8, 256), "IQ4_K", patterns=["ffn_down", r"\.ffn_u"]) == ("IQ4_K_R4", "")
    assert planned(up, (8, 256), "IQ4_K", patterns=["ffn_down"]) == ("IQ4_K", "not selected")
    assert planned(up, (8, 256), "IQ4_K_R4", patterns=["ffn_down"], undo=True) == (
        "IQ4_K_R4",
        "not selected",
    )
    with pytest.raises(UsageError, match="not a regular expression"):
        plan_repack([], ["("])


def test_file_types():
    numbers = {
        2: 202,
        7: 207,
        8: 208,
        10: 210,
        11: 211,
        12: 211,
        13: 211,
        14: 214,
        15: 214,
        16: 216,
        17: 216,
        18: 218,
        19: 219,
        20: 220,
        23: 223,
        24: 224,
        25: 225,
        26: 226,
        29: 229,
        30: 230,
        31: 231,
        32: 232,
        135: 335,
        137: 337,
        138: 338,
        141: 341,
        145: 345,
        150: 350,
        149: 398,
    }
    for plain, number in numbers.items():
        assert repacked_file_type(plain, []) == number
    assert (
        repacked_file_type(38, [])
        is repacked_file_type(152, [])
        is repacked_file_type("?", [])
        is None
    )
    undone = {number: repacked_file_type(number, [], undo=True) for number in numbers.values()}
    assert undone[214] == 15 and undone[211] == 12 and undone[216] == 17 and undone[202] == 2
    assert [repacked_file_type(number, [], undo=True) for number in (351, 35, 140)] == [38, 2, None]
    left = plan_repack([TensorInfo("a", (8, 256), ggml_type("Q4_K_R4"))], ["b"], undo=True)
    assert repacked_file_type(214, left, undo=True) is None


def test_command(tmp_path, capsys):
    plain = model(
        tmp_path / "plain.gguf",
        {
            "token_embd.weight": ((32, 256), "Q8_0"),
            "blk.0.ffn_up.weight": ((48, 256), "IQ4_K"),
            "blk.1.ffn_up.weight": ((48, 256), "IQ4_K"),
            "blk.1.ffn_down.weight": ((2, 256), "IQ4_KS"),
        },
    )
    before = plain.read_bytes()
    assert main(["repack", "--dry-run", str(plain)]) == 0
    out = capsys.readouterr().out
    assert (
        "2 of 4 tensors repacked" in out
        and "dry run" in out
        and "IQ4_KS" not in out
        and "2 rows are not a multiple of 4" in out
    )
    assert (
        main(
            [
                "repack",
                "--verbose",
                str(plain),
                str(tmp_path / "r.gguf"),
                "--pattern",
                r"blk\.1",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "iq4_k, -> iq4_k_r4" in out
        and "not selected" in out
        and "1 of 4 tensors repacked" in out
        and "repack time" in out
    )
    assert main(["repack", str(plain), str(tmp_path / "none.gguf"), "--pattern", "xyz"]) == 1
    assert "nothing to do" in capsys.readouterr().out and not (tmp_path / "none.gguf").exists()
    for words, why in (
        (["x.gguf"], "expected IN OUT"),
        ([str(plain), "x.gguf", "many"], "NTHREADS"),
        ([str(plain), str(plain)], "same file"),
        ([str(tmp_path), "x.gguf"], "folder"),
        ([str(plain), "x.gguf", "--pattern", "("], "regular expression"),
    ):
        assert main(["repack", *words]) == 1
        assert why in capsys.readouterr().err
    assert plain.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "plain.gguf",
        "r.gguf",
    ]


def test_split_models_and_bytes_after_rows(tmp_path):
    whole = model(
        tmp_path / "whole.gguf",
        {
            "blk.0.ffn_up.weight": ((48, 256), "IQ4_K"),
            "blk.0.ffn_down.weight": ((8, 256), "I2_S"),
            "blk.1.ffn_up.weight": ((48, 256), "IQ4_K"),
        },
    )
    shards = iqforge.split_model(whole, tmp_path / "s", max_tensors=1)
    with pytest.raises(OutputError, match="same file"):
        iqforge.repack_model(shards[0], shards[1])
    iqforge.repack_model(shards[0], tmp_path / "r.gguf")
    iqforge.repack_model(tmp_path / "r.gguf", tmp_path / "p.gguf", undo=True)
    assert (tmp_path / "p.gguf").read_bytes() == whole.read_bytes()


def test_errors_leave_nothing(tmp_path, monkeypatch):
    plain = model(
        tmp_path / "plain.gguf", {f"blk.{n}.ffn_up.weight": ((48, 256), "IQ4_K") for n in range(3)}
    )
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        raise MemoryError

    monkeypatch.setattr(repack, "interleave", failing)
    with pytest.raises(MemoryError):
        iqforge.repack_model(plain, tmp_path / "r.gguf", threads=2)
    assert calls and [p.name for p in tmp_path.iterdir()] == ["plain.gguf"]

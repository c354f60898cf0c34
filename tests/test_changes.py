"""Changes of a run besides types: removed blocks, a second output matrix, keys, the choice of
importances; and Q4_0 without -8.
"""

from __future__ import annotations

import logging

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import ShapeError, UsageError
from iqforge.formats.codecs.codec import decode, encode_float
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import Value, ValueType, i32, string, u32
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.imatrix.files.load import save_imatrix
from iqforge.quantize.plan.changes import Changes, override

from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return iqforge.convert_model(
        make_tiny_llama(folder / "hf", n_layers=4), folder / "tiny.gguf", outtype="bf16"
    )


def imatrix_of(path) -> Imatrix:
    generator = np.random.default_rng(5)
    with open_gguf(path) as source:
        return Imatrix(
            {
                t.name: Entry(
                    generator.lognormal(size=(t.n_matrices, t.n_cols)) * 100,
                    np.full(t.n_matrices, 100),
                )
                for t in source.tensors
                if t.name.startswith("blk.") and len(t.shape) > 1
            },
            3,
            512,
            ("text.txt",),
        )


def bytes_of(path) -> dict[str, bytes]:
    with open_gguf(path) as model:
        return {t.name: bytes(model.read_bytes(t, 0, t.n_bytes)) for t in model.tensors}


@pytest.mark.slow
def test_layers_are_left_out(bf16, tmp_path, capsys):
    out, whole = tmp_path / "q.gguf", tmp_path / "all.gguf"
    save_imatrix(imatrix_of(bf16), tmp_path / "m.dat")
    command = ["quantize", "--imatrix", str(tmp_path / "m.dat")]
    assert main([*command, str(bf16), str(whole), "IQ4_NL"]) == 0
    assert main([*command, "--prune-layers", "0,2", str(bf16), str(out), "IQ4_NL"]) == 0
    before, after = bytes_of(whole), bytes_of(out)
    for name, data in after.items():  # importances are those of the old number, too
        assert (
            data
            == before[
                (
                    name.replace("blk.1.", "blk.3.").replace("blk.0.", "blk.1.")
                    if name.startswith("blk.")
                    else name
                )
            ]
        ), name
    assert len(before) - len(after) == 2 * sum(name.startswith("blk.0.") for name in before)
    with open_gguf(out) as model:
        assert model.metadata["llama.block_count"].data == 2
        assert (
            model.metadata["quantize.recipe"].data == '{"prune_layers": [0, 2], "type": "IQ4_NL"}'
        )
        assert model.metadata["quantize.imatrix.entries_count"].data == len(
            imatrix_of(bf16).entries
        )
    with iqforge.load_model(out) as model:
        assert np.isfinite(model.forward([1, 5, 9]).numpy()).all()
    for layers, said in (
        ("4", "no layer 4: the model has layers 0 to 3"),
        ("0,1,2,3", "no layer would be left"),
        ("a", "expected numbers"),
    ):
        assert (
            main(["quantize", "--prune-layers", layers, "--dry-run", str(bf16), "q8_0"]) == 1
            and said in capsys.readouterr().err
        )


def test_keys_of_layers_that_are_left_out(tmp_path):
    sizes = Value(ValueType.ARRAY, [1, 2, 3, 4, 5], ValueType.INT32)
    metadata = {
        "general.architecture": string("deepseek2"),
        "deepseek2.block_count": u32(5),
        "deepseek2.feed_forward_length": sizes,
        "deepseek2.leading_dense_block_count": u32(2),
        "deepseek2.nextn_predict_layers": u32(1),
        "tokenizer.ggml.scores": sizes,
    }
    tensors = [TensorInfo(f"blk.{i}.ffn_up.weight", (4, 32), ggml_type("F32")) for i in range(5)]
    with GGUFWriter(tmp_path / "m.gguf", metadata, tensors) as sink:
        for tensor in tensors:
            sink.write(tensor, np.zeros(tensor.n_bytes, dtype=np.uint8))
    iqforge.quantize_model(
        tmp_path / "m.gguf", tmp_path / "q.gguf", "COPY", changes=Changes(prune_layers=[1, 4])
    )
    with open_gguf(tmp_path / "q.gguf") as model:
        found = {
            key.removeprefix("deepseek2."): value.data for key, value in model.metadata.items()
        }
        assert [t.name for t in model.tensors] == [f"blk.{i}.ffn_up.weight" for i in range(3)]
    assert (
        found["block_count"] == 3
        and found["feed_forward_length"] == [1, 3, 4]
        and found["tokenizer.ggml.scores"] == [1, 2, 3, 4, 5]
    )
    assert found["leading_dense_block_count"] == 1 and found["nextn_predict_layers"] == 0


def test_second_output_matrix(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    assert (
        main(
            [
                "quantize",
                "--extra-output-tensor",
                "q4_0",
                "--output-tensor-type",
                "q8_0",
                str(bf16),
                str(out),
                "Q4_0",
            ]
        )
        == 0
    )
    with open_gguf(out) as model:
        names = [t.name for t in model.tensors]
        assert names.index("output_extra.weight") == names.index("output.weight") + 1
        extra, first = model.tensor("output_extra.weight"), model.tensor("output.weight")
        assert (extra.type.name, first.type.name, extra.shape) == ("Q4_0", "Q8_0", first.shape)
        both = [decode(t.type, model.read_rows(t, 0, t.n_rows), t.n_cols) for t in (extra, first)]
    assert 0 < np.abs(both[0] - both[1]).max() < np.abs(both[1]).max() / 3
    with iqforge.load_model(out) as model:
        assert np.isfinite(model.forward([1, 5, 9]).numpy()).all()
    tied = iqforge.convert_model(
        make_tiny_qwen3moe(tmp_path / "hf", n_experts=2), tmp_path / "moe.gguf", outtype="bf16"
    )
    untied = "output.weight" in bytes_of(tied)
    iqforge.quantize_model(tied, out, "Q8_0", changes=Changes(extra_output="q5_0"))
    names = list(bytes_of(out))
    assert (
        names[names.index("output.weight" if untied else "token_embd.weight") + 1]
        == "output_extra.weight"
    )
    command = ["quantize", "--dry-run", "--no-estimate", "--extra-output-tensor", "q8_0"]
    assert main([*command, "--output-tensor-type", "q4_0", str(bf16), "Q4_0"]) == 1
    assert "is not smaller in Q8_0 than output.weight in Q4_0" in capsys.readouterr().err


def test_keys_that_are_set(bf16, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    flags = [
        "general.name=str:it = mine",
        "llama.expert_count=int:4",
        "a.b=int:-3",
        "a.c=float:1.5",
        "a.d=bool:true",
    ]
    words = [word for flag in flags for word in ("--override-kv", flag)]
    assert main(["quantize", *words, str(bf16), str(out), "Q4_0"]) == 0
    with open_gguf(bf16) as source, open_gguf(out) as model:
        assert model.metadata["general.name"].data == "it = mine" and model.metadata["a.b"] == i32(
            -3
        )
        assert model.metadata["llama.expert_count"] == i32(4)  # as ik_llama.cpp writes it
        assert model.metadata["a.c"].data == 1.5 and model.metadata["a.d"].data is True
        keys = list(model.metadata)
        assert keys.index("general.name") == list(source.metadata).index("general.name")
        assert keys.index("a.b") > keys.index("general.quantization_version")
        # As the mix has it for four experts.
        assert model.tensor("blk.2.attn_v.weight").type.name == "Q8_0"
    assert override("a=int:-3", "mainline") == ("a", u32(3))
    for text in (
        "a",
        "a=int",
        "a=int:x",
        "a=bool:1",
        "a=float:",
        "=int:1",
        "a=long:1",
        "a=int:3000000000",
        "k" * 128 + "=int:1",
        "a=str:" + "v" * 128,
    ):
        with pytest.raises(UsageError, match="int, float, bool or str|127 bytes|is not "):
            override(text)
    assert main(["quantize", "--dry-run", "--override-kv", "a=int:x", str(bf16), "Q4_0"]) == 1
    assert "'x' is not a 32-bit integer" in capsys.readouterr().err


def test_which_importances_are_used(bf16, tmp_path, caplog):
    imatrix, out = imatrix_of(bf16), tmp_path / "q.gguf"
    n = len(imatrix.entries)

    def weighted(**changes) -> set[str]:
        report = iqforge.quantize_model(
            bf16, out, "Q4_0", imatrix, changes=Changes(**changes), provenance=False
        )
        with open_gguf(out) as model:
            entries.append(model.metadata["quantize.imatrix.entries_count"].data)
        return {t.planned.source.name for t in report.tensors if t.weighted}

    entries: list[int] = []
    assert len(weighted()) == n
    assert weighted(exclude_weights=["attn_q", "ffn"]) == {
        name for name in imatrix.entries if "attn_q" not in name and "ffn" not in name
    }
    with caplog.at_level(logging.WARNING):
        assert weighted(include_weights=["blk.1.attn"]) == {
            name for name in imatrix.entries if name.startswith("blk.1.attn")
        }
    assert entries == [n, n - 16, 4] and not caplog.records
    with pytest.raises(UsageError, match="cannot be used together"):
        Changes(include_weights=["a"], exclude_weights=["b"])
    before = bytes_of(out)
    weighted(include_weights=["blk.1.attn"], hide_imatrix=True)
    assert bytes_of(out) == before
    with open_gguf(out) as model:
        said = {key: value.data for key, value in model.metadata.items() if "imatrix" in key}
    assert said == {
        "quantize.imatrix.file": "top_secret",
        "quantize.imatrix.dataset": "top_secret",
        "quantize.imatrix.entries_count": 0,
        "quantize.imatrix.chunks_count": 0,
    }
    imatrix.path = str(tmp_path / "m.dat")
    save_imatrix(imatrix, imatrix.path)
    iqforge.quantize_model(bf16, out, "Q4_0", imatrix.path, changes=Changes(hide_imatrix=True))
    with open_gguf(out) as model:
        assert "quantize.imatrix.sha256" not in model.metadata


def test_codes_from_minus_seven_to_seven_come_back(tmp_path, capsys):
    generator = np.random.default_rng(1)
    codes, scales = (
        generator.integers(-7, 8, (64, 8, 32)),
        generator.lognormal(size=(64, 8, 1)).astype(np.float16).astype(np.float32),
    )
    # Some value is at the end of its block.
    codes[:, :, 0] = np.where(generator.random((64, 8)) < 0.5, -7, 7)
    codes[3, 2] = 0
    x = (codes * scales).astype(np.float32).reshape(64, 256)
    tensors = [
        TensorInfo(f"blk.0.ffn_{part}.weight", x.shape, ggml_type("F32")) for part in ("up", "down")
    ]
    with GGUFWriter(
        tmp_path / "m.gguf", {"general.architecture": string("llama")}, tensors
    ) as sink:
        for tensor in tensors:
            sink.write(tensor, encode_float("F32", x))
    command = [
        "quantize",
        "--pure",
        "--symmetric-q40",
        "--slow-iq2ks",
        "--max-buffer-size",
        "100",
        "--tensor-type",
        "down=q4_0_r8",
    ]
    assert main([*command, str(tmp_path / "m.gguf"), str(tmp_path / "q.gguf"), "Q4_0"]) == 0
    said = capsys.readouterr().out
    assert "--slow-iq2ks has no effect" in said and "--max-buffer-size has no effect" in said
    with open_gguf(tmp_path / "q.gguf") as model:
        for tensor in model.tensors:
            assert np.array_equal(decode(tensor.type, model.read_rows(tensor, 0, 64), 256), x), (
                tensor
            )
        blocks = np.array(model.read_rows(model.tensors[0], 0, 64)).reshape(-1, 18)
    nibbles = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4])
    assert nibbles.min() == 1 and nibbles.max() == 15
    imatrix = Imatrix(
        {tensors[0].name: Entry(generator.lognormal(size=(1, 256)) * 9, np.full(1, 9))}, 1, 512
    )
    iqforge.quantize_model(
        tmp_path / "m.gguf", tmp_path / "i.gguf", "Q4_0", imatrix, pure=True, symmetric_q40=True
    )
    # Importances have no effect.
    assert (
        bytes_of(tmp_path / "i.gguf")[tensors[0].name]
        == bytes_of(tmp_path / "q.gguf")[tensors[0].name]
    )


def test_repack_by_the_flag(bf16, tmp_path, capsys):
    quantized, out, other = (tmp_path / name for name in ("q.gguf", "r.gguf", "o.gguf"))
    iqforge.quantize_model(bf16, quantized, "Q8_0")
    assert (
        main(
            [
                "quantize",
                "--repack",
                "--repack-pattern",
                "attn_q,attn_k",
                str(quantized),
                str(out),
                "Q4_0",
                "2",
            ]
        )
        == 0
    )
    assert (
        main(["repack", "--pattern", "attn_q", "--pattern", "attn_k", str(quantized), str(other)])
        == 0
    )
    assert out.read_bytes() == other.read_bytes()
    capsys.readouterr()
    assert (
        main(
            [
                "quantize",
                "--repack",
                "--repack-pattern",
                "nothing",
                str(quantized),
                str(tmp_path / "none.gguf"),
                "Q4_0",
            ]
        )
        == 0
    )
    assert "nothing to do" in capsys.readouterr().out and not (tmp_path / "none.gguf").exists()


def test_plans_have_the_changed_names(bf16, tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "q.gguf"
    flags = ["--prune-layers", "1", "--extra-output-tensor", "q4_0"]
    words = ["quantize", "--no-provenance", *flags, str(bf16), str(out), "q8_0"]
    assert main([*words[:2], "--save-plan", str(plan), *words[2:]]) == 0
    first = out.read_bytes()
    assert main([*words[:2], "--plan", str(plan), *words[2:]]) == 0 and out.read_bytes() == first
    # Another model: all blocks, one output matrix.
    assert main(["quantize", "--plan", str(plan), "--dry-run", str(bf16)]) == 1
    with pytest.raises(ShapeError, match="cannot be IQ4_K: row length 320|output_extra"):
        wide = [TensorInfo("output.weight", (4, 320), ggml_type("F32"))]
        with GGUFWriter(
            tmp_path / "w.gguf", {"general.architecture": string("llama")}, wide
        ) as sink:
            sink.write(wide[0], np.zeros(wide[0].n_bytes, dtype=np.uint8))
        iqforge.quantize_model(
            tmp_path / "w.gguf", out, "Q8_0", changes=Changes(extra_output="iq4_k")
        )

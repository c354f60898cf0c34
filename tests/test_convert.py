"""Conversion: the files equal the reference converter's and, for generated checkpoints, what the
layout rules say.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.convert.architectures.registry import architecture_class
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.metadata.general import size_label
from iqforge.convert.source import CheckpointSource
from iqforge.convert.tensors.outtype import plan_outtype
from iqforge.errors import (
    ConfigError,
    NotFoundError,
    UsageError,
)
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf

from .opened_checkpoint import stored
from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe, write_safetensors

# --- against the reference
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, variant, outtype, merge",
    [
        ("llama", "f32", "f32", False),
        ("llama", "bf16", "bf16", False),
        ("llama", "q8_0", "q8_0", False),
        ("llama31", "f32", "f32", False),
        ("mistral", "f32", "f32", False),
        ("qwen3_moe", "f32", "f32", False),
        ("qwen3_moe", "bf16", "bf16", False),
        ("qwen3_moe", "q8_0", "q8_0", False),
        ("qwen3_moe", "fused-f32", "f32", True),
        ("tok_bpe_added", "f32", "f32", False),
        ("tok_bpe_pairs", "f32", "f32", False),
    ],
)
def test_file_equals_the_reference(
    tmp_path: Path, case: str, variant: str, outtype: str, merge: bool
):
    expected = shared(f"golden/convert/{case}/expected-{variant}.gguf")
    made = iqforge.convert_model(
        shared(f"golden/convert/{case}/hf"),
        tmp_path / "made.gguf",
        outtype,
        merge_gate_up=merge,
        name=f"Golden {case}",
    )
    with open_gguf(made) as ours, open_gguf(expected) as theirs:
        assert ours.metadata == theirs.metadata
        assert set(ours.tensors) == set(theirs.tensors)
    assert made.read_bytes() == expected.read_bytes()  # down to key order, tensor order and padding


def test_fused_q8_0_equals_the_listing(tmp_path: Path):
    listing = json.loads(shared("golden/convert/qwen3_moe/expected-fused-q8_0.json").read_text())
    made = iqforge.convert_model(
        shared("golden/convert/qwen3_moe/hf"),
        tmp_path / "made.gguf",
        "q8_0",
        merge_gate_up=True,
        name="Golden qwen3_moe",
    )
    with open_gguf(made) as file:
        found = [
            (
                t.name,
                t.type.name,
                list(reversed(t.shape)),
                hashlib.sha256(file.read_rows(t, 0, t.n_rows).tobytes()).hexdigest(),
            )
            for t in file.tensors
        ]
    assert found == [(t["name"], t["type"], t["shape"], t["sha256"]) for t in listing["tensors"]]


@pytest.mark.parametrize(
    "model, n_tensors", [("demo-llama", 47), ("mini-llama", 48), ("mini-qwen3moe", 38)]
)
def test_trained_models_convert(tmp_path: Path, model: str, n_tensors: int):
    made = iqforge.convert_model(shared(f"models/{model}"), tmp_path)
    assert made.name.endswith("-BF16.gguf")
    with open_gguf(made) as file:
        assert len(file.tensors) == n_tensors
        assert file.metadata["general.file_type"].data == 32
        assert file.metadata["tokenizer.ggml.pre"].data == "llama-bpe"


@pytest.mark.parametrize("case", ["Tiny-Llama-3-8B-Instruct", "qwen3moe"])
def test_plan_of_the_reference(tmp_path: Path, case: str):
    """Keys, order, shapes and bytes agree for sources filled by a rule. One of them has the key
    `num_experts` and a top-level rope_theta.
    """
    plan = json.loads(shared("golden/tools/convert_plans.json").read_text())[case]
    tensors = {}
    for name, (_, shape) in plan["source"].items():
        flat, seed = np.arange(np.prod(shape), dtype=np.float64), sum(name.encode()) % 251
        tensors[name] = (
            (((7 * flat + 13 * seed) % 251) / 251 - 0.5).astype(np.float32).reshape(shape)
        )
    (tmp_path / "config.json").write_text(json.dumps(plan["config"]))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    converter = architecture_class(checkpoint.architecture)(checkpoint)
    keys = {
        key: value.data for key, value in converter.metadata().items() if key != "general.file_type"
    }
    wanted = {
        key: value for key, (_, value) in plan["keys"].items() if not key.startswith("general.")
    }
    assert list(keys) == list(wanted) and keys == pytest.approx(wanted, rel=1e-6)
    made = {
        t.info.name: (
            t.info.type.name,
            list(reversed(t.info.shape)),
            hashlib.sha256(t.rows.read(0, t.rows.n_rows).tobytes()).hexdigest()[:16],
        )
        for t in converter.tensors()
    }
    assert made == {name: (type, dims, digest) for name, type, dims, digest in plan["tensors"]}
    assert (
        size_label([t.info for t in converter.tensors()]) == plan["keys"]["general.size_label"][1]
    )
    checkpoint.close()


# --- generated checkpoints
# --------------------------------------------------------------------------------------------------


def values(source, name: str) -> np.ndarray:
    """Return float32 of a whole tensor, read in pieces of uneven size."""
    tensor = next(t for t in source.tensors if t.name == name)
    rows = [
        source.read_rows(tensor, start, min(start + 37, tensor.n_rows))
        for start in range(0, tensor.n_rows, 37)
    ]
    return decode(tensor.type, np.concatenate(rows), tensor.n_cols).reshape(tensor.shape)


def test_llama_layout(tmp_path: Path):
    make_tiny_llama(tmp_path, n_heads=4, n_kv_heads=2, shards=3, dtype="f32")
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        for part, heads in (("q", 4), ("k", 2)):
            hf = stored(tmp_path, f"model.layers.1.self_attn.{part}_proj.weight")
            pairs = hf.reshape(heads, 2, 32, 256).swapaxes(1, 2).reshape(heads * 64, 256)
            assert np.array_equal(values(source, f"blk.1.attn_{part}.weight"), pairs)
        for hf_name, name in (
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.down_proj", "ffn_down"),
            ("mlp.gate_proj", "ffn_gate"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            assert np.array_equal(
                values(source, f"blk.0.{name}.weight"),
                stored(tmp_path, f"model.layers.0.{hf_name}.weight"),
            )
        assert source.metadata["llama.rope.dimension_count"].data == 64
        assert len(source.metadata["tokenizer.ggml.tokens"].data) == 320


def test_llama_biases_are_paired_too(tmp_path: Path):
    make_tiny_llama(tmp_path, n_layers=1, dtype="f32", config={"attention_bias": True})
    names = {"q": 256, "k": 128, "v": 128, "o": 256}
    biases = {
        f"model.layers.0.self_attn.{part}_proj.bias": np.arange(size, dtype=np.float32)
        for part, size in names.items()
    }
    with open_checkpoint(tmp_path) as checkpoint:
        whole = {name: stored(tmp_path, name) for name in checkpoint.tensors}
    write_safetensors(tmp_path / "model.safetensors", whole | biases)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert values(source, "blk.0.attn_q.bias")[:4].tolist() == [0, 32, 1, 33]
        assert values(source, "blk.0.attn_v.bias")[:4].tolist() == [0, 1, 2, 3]
        assert {t.name: t.type.name for t in plan_outtype(source, "q8_0")[0]}[
            "blk.0.attn_q.bias"
        ] == "F32"


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("merge", [False, True])
def test_experts(tmp_path: Path, stacked: bool, merge: bool):
    # The experts of a layer are in two shards.
    make_tiny_qwen3moe(tmp_path / "plain", shards=3, seed=5, n_ff_expert=96)
    folder = (
        make_tiny_qwen3moe(tmp_path / "stacked", stacked=True, seed=5, n_ff_expert=96)
        if stacked
        else tmp_path / "plain"
    )
    gate, up, down = (
        np.stack(
            [
                stored(tmp_path / "plain", f"model.layers.1.mlp.experts.{x}.{part}_proj.weight")
                for x in range(4)
            ]
        )
        for part in ("gate", "up", "down")
    )
    with CheckpointSource(open_checkpoint(folder), merge_gate_up=merge) as source:
        names = {t.name for t in source.tensors}
        assert ("blk.1.ffn_gate_up_exps.weight" in names) == merge and (
            "blk.1.ffn_gate_exps.weight" in names
        ) == (not merge)
        assert np.array_equal(values(source, "blk.1.ffn_down_exps.weight"), down)
        if merge:
            assert np.array_equal(
                values(source, "blk.1.ffn_gate_up_exps.weight"), np.concatenate([gate, up], axis=1)
            )
        else:
            assert np.array_equal(values(source, "blk.1.ffn_gate_exps.weight"), gate)
            assert np.array_equal(values(source, "blk.1.ffn_up_exps.weight"), up)
        assert source.metadata["general.size_label"].data.startswith("4x")


def test_tied_embeddings_drop_the_head(tmp_path: Path):
    make_tiny_llama(tmp_path, config={"tie_word_embeddings": True})  # a head is stored all the same
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert "output.weight" not in {t.name for t in source.tensors}


@pytest.mark.parametrize(
    "config, base, extra",
    [
        ({"rope_theta": 5e5}, 5e5, {}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            1e6,
            {},
        ),
        ({"rope_theta": None}, 1e4, {}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            1e4,
            {"type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope_parameters": {
                    "rope_theta": 1e6,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                    "beta_fast": 32,
                }
            },
            1e6,
            {"type": "yarn", "factor": 4.0, "original_context_length": 512, "yarn_beta_fast": 32.0},
        ),
    ],
)
def test_rope_in_old_and_new_configs(tmp_path: Path, config: dict, base: float, extra: dict):
    make_tiny_llama(tmp_path, n_layers=1, config=config)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert source.metadata["llama.rope.freq_base"].data == base
        prefix = "llama.rope.scaling."
        assert {
            key.removeprefix(prefix): value.data
            for key, value in source.metadata.items()
            if key.startswith(prefix)
        } == extra


@pytest.mark.parametrize(
    "change, factors",
    [
        ({}, [1, 1, 1, 1, 1, 1, 4.681482315063477, 8]),
        # As in Llama 4 Scout. Wavelengths are 4,443 and 22,908 on both sides of 8,192.
        (
            {"rope_theta": 500000.0, "factor": 16.0, "high_freq_factor": 1.0},
            [1, 1, 1, 1, 1, 16, 16, 16],
        ),
        ({"high_freq_factor": 0.5}, None),
    ],
)
def test_llama3_scaling_becomes_a_tensor(tmp_path: Path, change: dict, factors: list | None):
    scaling = {
        "rope_theta": 10000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        **change,
    }
    make_tiny_llama(
        tmp_path,
        n_layers=1,
        n_embd=256,
        n_heads=16,
        n_kv_heads=4,
        config={"rope_parameters": scaling},
    )
    if factors is None:
        with pytest.raises(ConfigError, match=r"high_freq_factor 0.5 is below low_freq_factor 1.0"):
            CheckpointSource(open_checkpoint(tmp_path))
        return
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert source.tensors[0].name == "rope_freqs.weight"
        assert values(source, "rope_freqs.weight") == pytest.approx(factors)


@pytest.mark.parametrize(
    "dtype, outtype, file_type, matrix",
    [
        ("bf16", "auto", 32, "BF16"),
        ("f16", "auto", 1, "F16"),
        ("f32", "auto", 1, "F16"),
        ("bf16", "F32", 0, "F32"),
        ("bf16", "q8_0", 7, "Q8_0"),
    ],
)
def test_outtype(tmp_path: Path, dtype: str, outtype: str, file_type: int, matrix: str):
    make_tiny_qwen3moe(tmp_path, n_layers=1, dtype=dtype, n_ff_expert=48)
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        plan, number = plan_outtype(source, outtype)
        types = {t.name: t.type.name for t in plan}
        assert (
            number == file_type and types["blk.0.attn_q.weight"] == types["output.weight"] == matrix
        )
        assert (
            types["blk.0.attn_norm.weight"]
            == types["blk.0.attn_q_norm.weight"]
            == types["blk.0.ffn_gate_inp.weight"]
            == "F32"
        )
        # Rows of 48.
        assert types["blk.0.ffn_down_exps.weight"] == ("F16" if matrix == "Q8_0" else matrix)
        with pytest.raises(UsageError, match="q9"):
            plan_outtype(source, "q9")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    from iqforge.cli import main

    folder = make_tiny_qwen3moe(tmp_path / "m", n_layers=1)
    out = tmp_path / "out-{ftype}.gguf"
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(out),
                "--outtype",
                "f16",
                "--fuse-gate-up-exps",
                "--dry-run",
            ]
        )
        == 0
    )
    assert "blk.0.ffn_gate_up_exps.weight" in capsys.readouterr().out and not list(
        tmp_path.glob("*.gguf")
    )
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(out),
                "--outtype",
                "f16",
                "--merge-gate-up",
                "--model-name",
                "N",
            ]
        )
        == 0
    )
    with open_gguf(tmp_path / "out-f16.gguf") as file:
        assert file.metadata["general.name"].data == "N" and file.tensor(
            "blk.0.ffn_gate_up_exps.weight"
        ).shape == (4, 512, 256)
    assert main(["convert", str(folder), "--outfile", str(tmp_path), "--pre", "llama_bpe"]) == 1
    assert "did you mean llama-bpe" in capsys.readouterr().err
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert (
        main(
            [
                "convert",
                str(folder),
                "--outfile",
                str(tmp_path / "v.gguf"),
                "--vocab-only",
                "--pre",
                "qwen2",
            ]
        )
        == 0
    )
    with open_gguf(tmp_path / "v.gguf") as file:
        assert (
            not file.tensors
            and file.metadata["tokenizer.ggml.pre"].data == "qwen2"
            and "general.file_type" not in file.metadata
        )
    with pytest.raises(NotFoundError):
        iqforge.convert_model(folder, tmp_path / "w.gguf")
    assert not list(tmp_path.glob("w.gguf*"))

"""LoRA adapters: equal to the reference's files, and to the conversion of weights with the adapter
merged in.
"""

from __future__ import annotations

import json
import math
import os

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.convert.lora import AdapterSource
from iqforge.errors import (
    CheckpointError,
    ConfigError,
    IqforgeError,
    NotFoundError,
    OutputError,
    ShapeError,
    UnsupportedTypeError,
    UsageError,
)
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf

from .shared import shared
from .tiny_cases import CASES, SMALL
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe, write_safetensors
from .tiny_models import make_tiny_model

R, ALPHA = 4, 10


@pytest.mark.parametrize("outtype", ["f32", "f16"])
def test_equal_to_the_reference(tmp_path, outtype):
    expected = shared(f"golden/convert/lora_llama/expected-{outtype}.gguf")
    made = iqforge.convert_lora(
        shared("golden/convert/lora_llama/adapter"),
        tmp_path / "made.gguf",
        outtype,
        base=shared("golden/convert/llama/hf"),
    )
    assert made.read_bytes() == expected.read_bytes()


def stored(folder) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def make_adapter(folder, base, weights, *, dtype="f32", extra=None, settings=None, ranks=None):
    """Write a PEFT adapter for `weights` of the checkpoint `base`. Return its halves by weight."""
    random, halves, tensors = np.random.default_rng(5), {}, {}
    shapes = {name: values.shape for name, values in stored(base).items()}
    for name in weights:
        n_out, n_in = shapes[name]
        rank = (ranks or {}).get(name, R)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if "embed_tokens" in name:
            a, b = random.standard_normal((rank, n_out)), random.standard_normal((n_in, rank))
            tensors |= {f"{stem}.lora_embedding_A": a, f"{stem}.lora_embedding_B": b}
        else:
            a, b = random.standard_normal((rank, n_in)), random.standard_normal((n_out, rank))
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        halves[name] = (a.astype(np.float32), b.astype(np.float32))
    folder.mkdir()
    tensors = {
        name: values.astype(np.float32) for name, values in (tensors | (extra or {})).items()
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype)
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "base_model_name_or_path": str(base)}
            | (settings or {})
        )
    )
    return halves


def floats(path) -> dict[str, np.ndarray]:
    with open_gguf(path) as file:
        return {
            t.name: decode(t.type, file.read_rows(t, 0, t.n_rows), t.n_cols).reshape(t.shape)
            for t in file.tensors
        }


def applied(base: dict[str, np.ndarray], adapter: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with the adapter added as a runtime does, each with the scale of its
    rank.
    """
    result = dict(base)
    for name in {
        name.removesuffix(".lora_a").removesuffix(".lora_b") for name in adapter if ".lora_" in name
    }:
        a, b = adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]
        result[name] = base[name] + ALPHA / b.shape[-1] * (
            a @ b.T if name == "token_embd.weight" else b @ a
        )
    return result | {name: values for name, values in adapter.items() if ".lora_" not in name}


def check_like_merged(tmp_path, base, halves, new=None):
    """Check that base plus adapter, both converted, equals the converted model with the adapter
    merged in.
    """
    made = iqforge.convert_lora(tmp_path / "lora", tmp_path / "lora.gguf")
    tensors = stored(base)
    for name, (a, b) in halves.items():
        added = (b @ a).T if "embed_tokens" in name else b @ a
        tensors[name] = np.ascontiguousarray(tensors[name] + ALPHA / len(a) * added)
    expected_folder = tmp_path / "merged"
    expected_folder.mkdir()
    for file in base.iterdir():
        (expected_folder / file.name).write_bytes(file.read_bytes())
    write_safetensors(expected_folder / "model.safetensors", tensors | (new or {}))
    expected = floats(iqforge.convert_model(expected_folder, tmp_path / "expected.gguf", "f32"))
    found = applied(
        floats(iqforge.convert_model(base, tmp_path / "base.gguf", "f32")), floats(made)
    )
    assert found.keys() == expected.keys()
    for name in expected:
        assert np.allclose(found[name], expected[name], rtol=0, atol=1e-4), name
    return made


def test_same_as_merging_first(tmp_path):
    base = make_tiny_llama(tmp_path / "hf", n_layers=1, dtype="f32")
    weights = [name for name in stored(base) if "norm" not in name]  # embedding and head too
    norm = {"model.layers.0.input_layernorm.weight": np.full(256, 1.5, np.float32)}
    halves = make_adapter(
        tmp_path / "lora",
        base,
        weights,
        extra={f"base_model.model.{name}": values for name, values in norm.items()},
        ranks={weights[1]: 6},
    )
    made = iqforge.convert_lora(tmp_path / "lora", tmp_path / "x.gguf")
    with open_gguf(made) as file:
        assert {key: value.data for key, value in file.metadata.items()} == {
            "general.architecture": "llama",
            "general.type": "adapter",
            "adapter.type": "lora",
            "general.name": "Lora",
            "adapter.lora.alpha": 10.0,
            "general.quantization_version": 2,
        }
        assert file.tensor("blk.0.attn_norm.weight").type.name == "F32"
    check_like_merged(tmp_path, base, halves, norm)


@pytest.mark.parametrize(
    "case",
    [
        "step35",
        "exaone_moe",
        "apertus",
        "internlm2",
        "deepseek_moe",
        "qwen3vl",
        "hy_v3",
        "command_a_plus",
        "gemma",
        "gemma3n",
    ],
)
def test_all_matrices_of_other_models(tmp_path, case):
    tiny = make_tiny_model(CASES[case], SMALL, tmp_path / "hf")
    weights = [
        name for name, x in stored(tiny.folder).items() if "layers.1." in name and x.ndim == 2
    ]
    assert len(weights) > 4
    check_like_merged(tmp_path, tiny.folder, make_adapter(tmp_path / "lora", tiny.folder, weights))


def test_experts_are_stacked(tmp_path):
    base = make_tiny_qwen3moe(tmp_path / "hf", n_layers=1, dtype="f32")
    weights = [
        name
        for name in stored(base)
        if ".experts." in name or "q_proj" in name or "mlp.gate.weight" in name
    ]
    made = check_like_merged(tmp_path, base, make_adapter(tmp_path / "lora", base, weights))
    with open_gguf(made) as file:
        assert file.tensor("blk.0.ffn_down_exps.weight.lora_a").shape == (4, R, 256)
        assert file.tensor("blk.0.ffn_down_exps.weight.lora_b").shape == (4, 256, R)


def test_rows_and_columns_in_another_order(tmp_path):
    """In Qwen3.5, value heads of the delta net change places, in rows of some weights and in
    columns of another.
    """
    from safetensors.torch import load_file

    source, base = shared("golden/convert/qwen3_5/hf"), tmp_path / "hf"
    base.mkdir()
    tensors = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors |= {name: values.float().numpy() for name, values in load_file(file).items()}
        elif "index" not in file.name:
            (base / file.name).write_bytes(file.read_bytes())
    write_safetensors(base / "model.safetensors", tensors)
    weights = [
        name
        for name, values in tensors.items()
        if values.ndim == 2 and name.startswith("model.layers.")
    ]
    assert any("out_proj" in name for name in weights) and any(
        "in_proj_qkv" in name for name in weights
    )
    check_like_merged(tmp_path, base, make_adapter(tmp_path / "lora", base, weights))


def test_types_and_names(tmp_path):
    base = make_tiny_llama(tmp_path / "hf", n_layers=1, dtype="f32")
    make_adapter(tmp_path / "lora", base, ["model.layers.0.self_attn.q_proj.weight"], dtype="bf16")
    for outtype, types, name in (
        ("f32", ["F32", "F32"], "Lora-F32-LoRA"),
        ("bf16", ["BF16", "BF16"], "Lora-BF16-LoRA"),
        ("auto", ["BF16", "BF16"], "Lora-BF16-LoRA"),
        ("q8_0", ["Q8_0", "F16"], "Lora-Q8_0-LoRA"),
    ):
        made = iqforge.convert_lora(tmp_path / "lora", None, outtype)
        assert made == tmp_path / "lora" / f"{name}.gguf"
        with open_gguf(made) as file:
            assert [t.type.name for t in file.tensors] == types
    assert (
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "a-{outtype}.gguf", "f16").name
        == "a-f16.gguf"
    )
    with pytest.raises(UsageError, match="q4_0"):
        iqforge.convert_lora(tmp_path / "lora", None, "q4_0")
    with pytest.raises(OutputError, match="same file"):
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "lora" / "adapter_model.safetensors")


def test_torch_files_and_rank_stabilized_scale(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    base = make_tiny_llama(tmp_path / "hf", n_layers=1, dtype="f32")
    make_adapter(
        tmp_path / "lora",
        base,
        ["lm_head.weight", "model.layers.0.self_attn.k_proj.weight"],
        settings={"use_rslora": True},
    )
    plain = iqforge.convert_lora(tmp_path / "lora", tmp_path / "a.gguf")
    with open_gguf(plain) as file:
        assert file.metadata["adapter.lora.alpha"].data == pytest.approx(ALPHA * math.sqrt(R))
    torch.save(
        load_file(tmp_path / "lora" / "adapter_model.safetensors"),
        tmp_path / "lora" / "adapter_model.bin",
    )
    os.unlink(tmp_path / "lora" / "adapter_model.safetensors")
    assert (
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "b.gguf").read_bytes()
        == plain.read_bytes()
    )


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"settings": {"peft_type": "IA3"}}, ConfigError, "IA3"),
        ({"settings": {"use_dora": True}}, ConfigError, "DoRA"),
        ({"settings": {"alpha_pattern": {"q_proj": 3}}}, ConfigError, "alpha_pattern"),
        ({"settings": {"fan_in_fan_out": True}}, ConfigError, "transposed"),
        ({"settings": {"lora_alpha": None}}, ConfigError, "lora_alpha"),
        ({"settings": {"base_model_name_or_path": "org/none"}}, NotFoundError, "--base"),
        ({"settings": {"use_rslora": True, "r": 3}}, CheckpointError, "no common alpha"),
        ({"extra": {f"{Q}.bias": np.zeros(256)}}, CheckpointError, "q_proj"),
        (
            {"extra": {"base_model.model.model.layers.0.mlp.up_proj.weight": np.zeros((512, 256))}},
            CheckpointError,
            "whole weight",
        ),
        (
            {"extra": {"base_model.model.model.layers.0.x.lora_A.weight": np.zeros((R, 8))}},
            CheckpointError,
            "lora_B is missing",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.zeros((R, 256)),
                    "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": np.zeros((512, R)),
                }
            },
            CheckpointError,
            "layer 9",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((R, 128)),
                    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.zeros((512, R)),
                }
            },
            CheckpointError,
            "implies",
        ),
        (
            {
                "extra": {
                    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((R, 256)),
                    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.zeros(
                        (512, R + 1)
                    ),
                }
            },
            CheckpointError,
            "rank 4.*5",
        ),
        (
            {
                "extra": {
                    "base_model.model.lm_head.lora_A.weight": np.zeros((R, 256)),
                    "base_model.model.lm_head.lora_B.weight": np.zeros((320, R)),
                }
            },
            CheckpointError,
            "belongs to no tensor",
        ),
        ({"extra": {f"{Q}.lora_embedding_A": np.zeros((R, 8))}}, CheckpointError, "second half"),
        (
            {
                "extra": {
                    "base_model.model.model.embed_tokens.lora_A.weight": np.zeros((R, 256)),
                    "base_model.model.model.embed_tokens.lora_B.weight": np.zeros((320, R)),
                }
            },
            CheckpointError,
            "lora_embedding",
        ),
        (
            {"extra": {"base_model.model.model.vision.norm.lora_A.weight": np.zeros(3)}},
            CheckpointError,
            "shape",
        ),
    ],
)
def test_refusals(tmp_path, changes, error, words):
    base = make_tiny_llama(tmp_path / "hf", n_layers=1, tied=True, dtype="f32")
    make_adapter(tmp_path / "lora", base, ["model.layers.0.self_attn.q_proj.weight"], **changes)
    with pytest.raises(error, match=words):
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_some_experts_and_joined_rows(tmp_path):
    base = make_tiny_qwen3moe(tmp_path / "hf", n_layers=1, dtype="f32")
    experts = [name for name in stored(base) if ".experts." in name]
    make_adapter(tmp_path / "lora", base, experts[:-1])
    with pytest.raises(CheckpointError, match="experts of which others"):
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "m.gguf")
    make_adapter(tmp_path / "lora2", base, experts, ranks={experts[0]: R + 1})
    with pytest.raises(CheckpointError, match="differ in rank"):
        iqforge.convert_lora(tmp_path / "lora2", tmp_path / "m.gguf")


def test_weights_whose_columns_are_rearranged(tmp_path):
    """For latent attention the conversion transposes kv_b per head, which no pair of matrices can
    express.
    """
    base = shared("golden/convert/deepseek_v2/hf")
    config = json.loads((base / "config.json").read_text())
    heads, nope, v, rank = (
        config[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    stem = "base_model.model.model.layers.0.self_attn.kv_b_proj"
    (tmp_path / "lora").mkdir()
    write_safetensors(
        tmp_path / "lora" / "adapter_model.safetensors",
        {
            f"{stem}.lora_A.weight": np.zeros((R, rank), np.float32),
            f"{stem}.lora_B.weight": np.zeros((heads * (nope + v), R), np.float32),
        },
    )
    (tmp_path / "lora" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": R, "lora_alpha": 1})
    )
    with pytest.raises(UnsupportedTypeError, match="attn_k_b.*cannot have an adapter"):
        iqforge.convert_lora(tmp_path / "lora", tmp_path / "m.gguf", base=base)


def test_rows_outside_a_tensor(tmp_path):
    base = make_tiny_llama(tmp_path / "hf", n_layers=1, dtype="f32")
    make_adapter(tmp_path / "lora", base, ["model.layers.0.mlp.up_proj.weight"])
    with AdapterSource(tmp_path / "lora") as source:
        tensor = source.tensors[0]
        assert source.read_rows(tensor, 0, tensor.n_rows).shape == (tensor.n_rows, tensor.row_bytes)
        with pytest.raises(ShapeError, match="were asked for"):
            source.read_rows(tensor, 0, tensor.n_rows + 1)


def test_command(tmp_path, capsys):
    base = make_tiny_llama(tmp_path / "hf", n_layers=1, dtype="f32")
    make_adapter(
        tmp_path / "lora",
        base,
        ["model.layers.0.self_attn.q_proj.weight"],
        settings={"base_model_name_or_path": "x/y"},
    )
    words = [
        "convert-lora",
        "--base",
        str(base),
        "--outfile",
        str(tmp_path / "m.gguf"),
        str(tmp_path / "lora"),
    ]
    assert main(["convert-lora", str(tmp_path / "lora")]) == 1
    assert main([*words, "--dry-run"]) == 0 and not (tmp_path / "m.gguf").exists()
    assert "blk.0.attn_q.weight.lora_b  4 x 256  F32" in capsys.readouterr().out
    assert main(words) == 0 and (tmp_path / "m.gguf").exists()
    assert main(["convert-lora", str(tmp_path / "none")]) == 1
    with pytest.raises(IqforgeError):
        iqforge.convert_lora(tmp_path / "hf")

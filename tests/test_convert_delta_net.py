"""Conversion of Qwen3-Next and Qwen3.5: gated delta nets, gated attention, a further block."""

from __future__ import annotations

import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError, ConfigError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf

from .golden import assert_like_listing, assert_like_reference
from .shared import shared
from .tiny_checkpoint import write_safetensors, write_tokenizer


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_file_equals_the_reference(tmp_path: Path, case: str):
    assert_like_reference(tmp_path, case)


@pytest.mark.parametrize(
    "variant, layout", [("fused-f32", {"merge_gate_up": True}), ("nomtp-f32", {"mtp": "drop"})]
)
def test_variants_equal_the_listing(tmp_path: Path, variant: str, layout: dict):
    assert_like_listing(tmp_path, "qwen3_5_moe", variant, **layout)


@pytest.mark.parametrize("case, block", [("qwen3_next", 4), ("qwen3_5_moe", 4)])
def test_further_block_alone(tmp_path: Path, case: str, block: int):
    made = iqforge.convert_model(
        shared(f"golden/convert/{case}/hf"), tmp_path / "m.gguf", "f32", mtp="only"
    )
    with (
        open_gguf(shared(f"golden/convert/{case}/expected-f32.gguf")) as whole,
        open_gguf(made) as part,
    ):
        kept = ("token_embd.", "output", f"blk.{block}.")
        assert {t.name for t in part.tensors} == {
            t.name for t in whole.tensors if t.name.startswith(kept)
        }


def test_trained_model_converts(tmp_path: Path):
    made = iqforge.convert_model(shared("models/mini-qwen35moe"), tmp_path)
    with open_gguf(made) as file:
        assert (
            file.metadata["qwen35moe.block_count"].data == 4
            and "qwen35moe.nextn_predict_layers" not in file.metadata
        )
        assert file.metadata["qwen35moe.rope.dimension_sections"].data == [11, 11, 10, 0]
        assert {t.name: t.shape for t in file.tensors}["blk.3.attn_q.weight"] == (1024, 512)


# --- from a generated checkpoint: two layers, the second with attention
# --------------------------------------------------------------

D, NK, NV, DK, DV, HD, FF, VOCAB = 32, 2, 6, 4, 8, 16, 48, 320


def delta_checkpoint(
    folder: Path, family: str, *, drop: tuple[str, ...] = (), **config
) -> dict[str, np.ndarray]:
    """Write a dense Qwen3.5 (`qwen35`) or a Qwen3-Next into `folder`. Return its tensors."""
    random = np.random.default_rng(3)
    channels, moe = 2 * NK * DK + NV * DV, family == "qwen3next"
    shapes = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    for layer in range(2):
        names = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        if layer == 0:
            delta = {
                "A_log": (NV,),
                "dt_bias": (NV,),
                "conv1d.weight": (channels, 1, 3),
                "norm.weight": (DV,),
                "out_proj.weight": (D, NV * DV),
            }
            parts = (
                {"in_proj_qkvz": channels + NV * DV, "in_proj_ba": 2 * NV}
                if moe
                else {
                    "in_proj_qkv": channels,
                    "in_proj_z": NV * DV,
                    "in_proj_a": NV,
                    "in_proj_b": NV,
                }
            )
            names |= {f"linear_attn.{name}": shape for name, shape in delta.items()}
            names |= {f"linear_attn.{name}.weight": (rows, D) for name, rows in parts.items()}
        else:
            names |= {
                "self_attn.q_proj.weight": (4 * HD, D),
                "self_attn.k_proj.weight": (HD, D),
                "self_attn.v_proj.weight": (HD, D),
                "self_attn.o_proj.weight": (D, 2 * HD),
                "self_attn.q_norm.weight": (HD,),
                "self_attn.k_norm.weight": (HD,),
            }
        expert = {"gate_proj": (FF, D), "up_proj": (FF, D), "down_proj": (D, FF)}
        stems = ["mlp.experts.0", "mlp.experts.1", "mlp.shared_expert"] if moe else ["mlp"]
        names |= {
            f"{stem}.{part}.weight": shape for stem in stems for part, shape in expert.items()
        }
        if moe:
            names |= {"mlp.gate.weight": (2, D), "mlp.shared_expert_gate.weight": (1, D)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    tensors = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        if name not in drop
    }
    values = {
        "architectures": ["Qwen3NextForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "hidden_size": D,
        "num_hidden_layers": 2,
        "intermediate_size": FF,
        "vocab_size": VOCAB,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HD,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 2,
        "linear_key_head_dim": DK,
        "linear_value_head_dim": DV,
        "linear_num_key_heads": NK,
        "linear_num_value_heads": NV,
        "linear_conv_kernel_dim": 3,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": FF,
        "shared_expert_intermediate_size": FF,
        **config,
    }
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    write_tokenizer(folder)
    write_safetensors(folder / "model.safetensors", tensors)
    return {
        name.removeprefix("model.layers.0.linear_attn."): values for name, values in tensors.items()
    }


def converted(folder: Path) -> dict[str, np.ndarray]:
    with CheckpointSource(open_checkpoint(folder)) as source:
        return {
            t.name: (
                decode(
                    t.type,
                    np.concatenate([source.read_rows(t, row, row + 1) for row in range(t.n_rows)]),
                    t.n_cols,
                ).reshape(t.shape)
            )
            for t in source.tensors
        }


def test_value_heads_are_tiled(tmp_path: Path):
    stored, made = delta_checkpoint(tmp_path, "qwen35"), converted(tmp_path)
    r, qk = NV // NK, 2 * NK * DK

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:  # [k, r, size] -> [r, k, size]
        return rows.reshape(NK, r, size, -1).swapaxes(0, 1).reshape(NV * size, -1)

    qkv = stored["in_proj_qkv.weight"]
    assert np.array_equal(
        made["blk.0.attn_qkv.weight"], np.concatenate([qkv[:qk], tiled(qkv[qk:], DV)])
    )
    conv = stored["conv1d.weight"][:, 0]
    assert np.array_equal(
        made["blk.0.ssm_conv1d.weight"], np.concatenate([conv[:qk], tiled(conv[qk:], DV)])
    )
    assert np.array_equal(made["blk.0.attn_gate.weight"], tiled(stored["in_proj_z.weight"], DV))
    assert np.array_equal(made["blk.0.ssm_alpha.weight"], tiled(stored["in_proj_a.weight"], 1))
    assert np.array_equal(made["blk.0.ssm_beta.weight"], tiled(stored["in_proj_b.weight"], 1))
    assert np.array_equal(made["blk.0.ssm_dt.bias"], tiled(stored["dt_bias"], 1).ravel())
    assert made["blk.0.ssm_a"] == pytest.approx(
        -np.exp(tiled(stored["A_log"], 1).ravel()), rel=1e-6
    )
    assert np.array_equal(made["blk.0.ssm_out.weight"], tiled(stored["out_proj.weight"].T, DV).T)
    assert np.array_equal(made["blk.0.ssm_norm.weight"], stored["norm.weight"])
    assert np.array_equal(
        made["blk.1.attn_q_norm.weight"], stored["model.layers.1.self_attn.q_norm.weight"] + 1
    )


def test_projections_are_unshuffled(tmp_path: Path):
    stored, made = delta_checkpoint(tmp_path, "qwen3next"), converted(tmp_path)
    v = NV // NK * DV
    heads = stored["in_proj_qkvz.weight"].reshape(NK, 2 * DK + 2 * v, D)
    parts = [
        heads[:, begin:end].reshape(-1, D)
        for begin, end in ((0, DK), (DK, 2 * DK), (2 * DK, 2 * DK + v), (2 * DK + v, None))
    ]
    assert np.array_equal(made["blk.0.attn_qkv.weight"], np.concatenate(parts[:3]))
    assert np.array_equal(made["blk.0.attn_gate.weight"], parts[3])
    assert np.array_equal(made["blk.0.ssm_ba.weight"], stored["in_proj_ba.weight"])
    assert np.array_equal(made["blk.0.ssm_conv1d.weight"], stored["conv1d.weight"][:, 0])
    assert made["blk.1.ffn_gate_exps.weight"].shape == (2, FF, D)


@pytest.mark.parametrize(
    "family, change, kind, words",
    [
        ("qwen35", {"linear_num_value_heads": 5}, ConfigError, "not a multiple"),
        ("qwen35", {"attn_output_gate": False}, ConfigError, "gate"),
        ("qwen35", {"full_attention_interval": 3}, CheckpointError, "no such tensor in layer 1"),
        (
            "qwen35",
            {"layer_types": ["full_attention", "linear_attention"]},
            ConfigError,
            "layer_types",
        ),
        ("qwen35", {"num_hidden_layers": 2**31 - 1}, ConfigError, "num_hidden_layers"),
        ("qwen35", {"rope_parameters": {"mrope_section": [1] * 5}}, ConfigError, "mrope_section"),
        ("qwen3next", {"mlp_only_layers": [1]}, ConfigError, "mlp_only_layers"),
        (
            "qwen3next",
            {"drop": ("model.layers.0.linear_attn.in_proj_qkvz.weight",)},
            CheckpointError,
            "in_proj_qkvz.weight': is missing",
        ),
        (
            "qwen35",
            {"drop": ("model.layers.0.linear_attn.A_log",)},
            CheckpointError,
            "A_log': is missing",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, family: str, change: dict, kind: type, words: str):
    delta_checkpoint(tmp_path, family, **change)
    with pytest.raises(kind, match=words):
        CheckpointSource(open_checkpoint(tmp_path))


def test_interval_from_the_kinds_of_layers(tmp_path: Path):
    delta_checkpoint(
        tmp_path,
        "qwen35",
        full_attention_interval=None,
        layer_types=["linear_attention", "full_attention"],
    )
    with CheckpointSource(open_checkpoint(tmp_path)) as source:
        assert source.metadata["qwen35.attention.recurrent_layers"].data == [True, False]

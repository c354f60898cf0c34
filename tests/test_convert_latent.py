"""Conversion of models with latent attention: DeepSeek, Mistral 4."""

from __future__ import annotations

import json
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import CheckpointError, ConfigError, UsageError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf

from .golden import assert_like_listing, assert_like_reference
from .shared import shared
from .tiny_checkpoint import write_safetensors, write_tokenizer


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "mistral4"])
def test_file_equals_the_reference(tmp_path: Path, case: str):
    # the reference reads the tensors of a shard by name, we as they lie: the selection bias, in
    # float32, comes first
    assert_like_reference(tmp_path, case, bytes_too=case != "deepseek_v3")


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3"])
def test_older_layout_equals_the_listing(tmp_path: Path, case: str, caplog):
    # that converter took name and size from the folder
    assert_like_listing(
        tmp_path, case, "ik-f32", mla_layout="ik", free_keys=("general.name", "general.size_label")
    )
    # It has no keys for groups of experts.
    assert ("4 groups of experts" in caplog.text) == (case == "deepseek_v3")


def test_trained_model_converts(tmp_path: Path):
    made = iqforge.convert_model(shared("models/mini-deepseek"), tmp_path)
    with open_gguf(made) as file:
        assert {t.name: t.shape for t in file.tensors}["blk.2.attn_k_b.weight"] == (8, 256, 64)
        assert (
            file.metadata["deepseek2.expert_gating_func"].data == 2
            and file.metadata["deepseek2.block_count"].data == 3
        )


# --- from a generated checkpoint: a dense layer, one with experts, and a further block that is
# dropped -------------------------------

D, HEADS, RANK, NOPE, ROPE, V, FF, FFE, E, VOCAB = 32, 3, 16, 12, 8, 10, 48, 16, 4, 320


def deepseek(
    folder: Path,
    *,
    hf_class: str = "DeepseekV3ForCausalLM",
    q_rank: int | None = 24,
    drop: str = "-",
    **config,
) -> Path:
    attention = {
        "kv_a_proj_with_mqa.weight": (RANK + ROPE, D),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * (NOPE + V), RANK),
        "o_proj.weight": (D, HEADS * V),
    }
    query = HEADS * (NOPE + ROPE)
    attention |= (
        {"q_proj.weight": (query, D)}
        if q_rank is None
        else {
            "q_a_proj.weight": (q_rank, D),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (query, q_rank),
        }
    )
    shapes = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    for layer in range(3):

        def ffn(stem: str, width: int) -> dict[str, tuple[int, ...]]:
            return {
                f"{stem}.gate_proj.weight": (width, D),
                f"{stem}.up_proj.weight": (width, D),
                f"{stem}.down_proj.weight": (D, width),
            }

        names = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        names |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if layer == 0:
            names |= ffn("mlp", FF)
        else:
            names |= {"mlp.gate.weight": (E, D)} | ffn("mlp.shared_experts", 2 * FFE)
            names |= {
                name: shape
                for expert in range(E)
                for name, shape in ffn(f"mlp.experts.{expert}", FFE).items()
            }
            if hf_class != "DeepseekV2ForCausalLM":
                names["mlp.gate.e_score_correction_bias"] = (E,)
        if layer == 2:
            names |= {
                "eh_proj.weight": (D, 2 * D),
                "enorm.weight": (D,),
                "embed_tokens.weight": (VOCAB, D),
            }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    random = np.random.default_rng(7)
    write_safetensors(
        folder / "model.safetensors",
        {
            name: random.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
            if not name.endswith(drop)
        },
    )
    values = {
        "architectures": [hf_class],
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "intermediate_size": FF,
        "moe_intermediate_size": FFE,
        "n_routed_experts": E,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": RANK,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
        **config,
    }
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if value is not None})
    )
    write_tokenizer(folder)
    return folder


def converted(folder: Path, **layout) -> tuple[dict[str, np.ndarray], dict]:
    with CheckpointSource(open_checkpoint(folder), **layout) as source:
        rows = {
            t.name: np.concatenate(
                [source.read_rows(t, row, min(row + 5, t.n_rows)) for row in range(0, t.n_rows, 5)]
            )
            for t in source.tensors
        }
        values = {
            t.name: decode(t.type, rows[t.name], t.n_cols).reshape(t.shape) for t in source.tensors
        }
        return values, {
            key.removeprefix("deepseek2."): value.data for key, value in source.metadata.items()
        }


@pytest.mark.parametrize("q_rank", [None, 24])
def test_keys_and_values_are_made_per_head(tmp_path: Path, q_rank: int | None):
    deepseek(tmp_path, q_rank=q_rank)
    split, keys = converted(tmp_path)
    joined, older = converted(tmp_path, mla_layout="ik")
    assert (
        keys["attention.head_count_kv"] == 1
        and keys["attention.key_length"] == RANK + ROPE
        and keys["expert_gating_func"] == 2
    )
    assert (
        older["attention.head_count_kv"] == HEADS and older["attention.key_length"] == NOPE + ROPE
    )
    assert (
        "expert_group_count" in keys
        and "expert_group_count" not in older
        and "attention.key_length_mla" not in older
    )
    kv_b = joined["blk.1.attn_kv_b.weight"].reshape(HEADS, NOPE + V, RANK)
    assert np.array_equal(split["blk.1.attn_k_b.weight"], kv_b[:, :NOPE].transpose(0, 2, 1))
    assert np.array_equal(split["blk.1.attn_v_b.weight"], kv_b[:, NOPE:])
    assert joined["blk.1.attn_k_b.weight"].shape == (HEADS * RANK, NOPE) and joined[
        "blk.1.attn_v_b.weight"
    ].shape == (HEADS * V, RANK)
    assert joined["blk.1.attn_k_b.weight"].tobytes() == split["blk.1.attn_k_b.weight"].tobytes()
    assert "blk.1.attn_kv_b.weight" not in split and not any(
        name.startswith("blk.2.") for name in split
    )
    assert ("attention.q_lora_rank" in keys) == (q_rank is not None)


def test_flash_is_v3_with_the_tokens_of_glm(tmp_path: Path, caplog):
    """In the spelling of newer configs, which list the kind of every layer."""
    config = {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse"]}
    values, keys = converted(deepseek(tmp_path, hf_class="Glm4MoeLiteForCausalLM", **config))
    assert keys["general.architecture"] == "deepseek2"
    assert keys["leading_dense_block_count"] == 1 and keys["expert_gating_func"] == 2
    assert "blk.1.exp_probs_b.bias" in values and "blk.1.ffn_gate_exps.weight" in values
    assert "[gMASK]" in caplog.text  # this vocabulary does not have it


@pytest.mark.parametrize(
    "hf_class", ["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"]
)
def test_the_text_model_of_kimi_is_v3(tmp_path: Path, hf_class: str):
    plain, outer = tmp_path / "plain", tmp_path / "outer"
    plain.mkdir()
    outer.mkdir()
    deepseek(plain)
    values, keys = converted(plain)
    with CheckpointSource(open_checkpoint(plain)) as source:
        tensors = {
            name: np.frombuffer(source.checkpoint.data(tensor), np.float32).reshape(tensor.shape)
            for name, tensor in source.checkpoint.tensors.items()
        }
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    others = ("vision_tower.encoder.blocks.0.norm0.weight", "mm_projector.proj.0.weight")
    write_safetensors(
        outer / "model.safetensors", nested | dict.fromkeys(others, np.ones(4, np.float32))
    )
    text = json.loads((plain / "config.json").read_text())
    config = {"architectures": [hf_class], "text_config": text | {"model_type": "kimi_k2"}}
    (outer / "config.json").write_text(json.dumps(config))
    write_tokenizer(outer)
    found, found_keys = converted(outer)
    named = ("general.name", "general.basename")
    assert {k: v for k, v in found_keys.items() if k not in named} == {
        k: v for k, v in keys.items() if k not in named
    }
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], values[name]) for name in values)


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (
            {"drop": "1.self_attn.kv_b_proj.weight"},
            CheckpointError,
            "kv_b_proj.weight': is missing",
        ),
        (
            {"drop": "1.mlp.gate.e_score_correction_bias"},
            CheckpointError,
            "e_score_correction_bias': is missing",
        ),
        (
            {"drop": "1.mlp.experts.3.up_proj.weight"},
            CheckpointError,
            "layer 1 lacks experts: expert 3",
        ),
        ({"num_nextn_predict_layers": 0}, CheckpointError, "model.layers.2.eh_proj"),
        ({"v_head_dim": 11}, CheckpointError, "kv_b_proj.*has shape"),
        ({"kv_lora_rank": None}, ConfigError, "'kv_lora_rank' is missing"),
        ({"moe_layer_freq": 2}, ConfigError, "moe_layer_freq"),
        ({"attention_bias": True}, ConfigError, "attention_bias"),
        ({"scoring_func": "tanh"}, ConfigError, "scoring_func"),
        ({"first_k_dense_replace": 3}, ConfigError, "first_k_dense_replace"),
        ({"topk_group": 3}, ConfigError, "topk_group"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 0.5}},
            ConfigError,
            "'mscale' is 1; GGUF's deepseek2 implies 0.5",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 1}},
            ConfigError,
            "'mscale' is missing; GGUF's deepseek2 implies 1",
        ),
        ({"mlp_layer_types": ["dense"]}, ConfigError, "mlp_layer_types' must say dense"),
        ({"mlp_layer_types": ["sparse", "dense"]}, ConfigError, "mlp_layer_types"),
        ({"mlp_layer_types": ["sparse"] * 2}, ConfigError, "'first_k_dense_replace' is 1, but"),
        (
            {"hf_class": "DeepseekV2ForCausalLM", "first_k_dense_replace": 2},
            CheckpointError,
            "no such tensor in layer 1",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict, kind: type, words: str):
    with pytest.raises(kind, match=words):
        CheckpointSource(open_checkpoint(deepseek(tmp_path, **change)))


def test_further_blocks_are_not_kept(tmp_path: Path):
    with pytest.raises(UsageError, match="without MTP blocks"):
        CheckpointSource(open_checkpoint(deepseek(tmp_path)), mtp="only")


def test_flag_of_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture):
    deepseek(tmp_path)
    assert main(["convert", str(tmp_path), "--mla-layout", "ik", "--no-mtp", "--dry-run"]) == 0
    assert "blk.0.attn_kv_b.weight" in capsys.readouterr().out
    assert main(["convert", str(tmp_path), "--dry-run"]) == 0
    assert "attn_kv_b" not in capsys.readouterr().out

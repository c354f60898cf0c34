"""Gemma 4 from checkpoints made here: layers that differ in almost everything, with the keys of
released configs and of newer ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import (
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV,
    SANDWICH,
    VOCAB,
    D,
    Names,
    convert,
    write,
)
from .family_checks import shapes_of

GEMMA4_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": GEMMA4_KINDS,
    "sliding_window": 8,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}


def gemma4_names() -> Names:
    """Return {stored name: (shape, GGUF name)} of a small Gemma 4 with everything that the family
    has.
    """
    names = {
        "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
        "model.norm.weight": ((D,), "output_norm.weight"),
        "model.embed_tokens_per_layer.weight": ((VOCAB, 32), "per_layer_token_embd.weight"),
        "model.per_layer_model_projection.weight": ((32, D), "per_layer_model_proj.weight"),
        "model.per_layer_projection_norm.weight": ((8,), "per_layer_proj_norm.weight"),
    }
    for layer, kind in enumerate(GEMMA4_KINDS):
        head, kv = (HEAD, KV) if kind == "sliding_attention" else (24, 24)
        wide = 2 if layer > 1 else 1
        lines = {
            "self_attn.q_proj.weight": ((HEADS * head, D), "attn_q.weight"),
            "self_attn.o_proj.weight": ((D, HEADS * head), "attn_output.weight"),
            "self_attn.q_norm.weight": ((head,), "attn_q_norm.weight"),
            "layer_scalar": ((1,), "layer_output_scale.weight"),
            "mlp.gate_proj.weight": ((wide * FF, D), "ffn_gate.weight"),
            "mlp.up_proj.weight": ((wide * FF, D), "ffn_up.weight"),
            "mlp.down_proj.weight": ((D, wide * FF), "ffn_down.weight"),
            "per_layer_input_gate.weight": ((8, D), "inp_gate.weight"),
            "per_layer_projection.weight": ((D, 8), "proj.weight"),
            "post_per_layer_input_norm.weight": ((D,), "post_norm.weight"),
            "router.proj.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
            "router.scale": ((D,), "ffn_gate_inp.scale"),
            "router.per_expert_scale": ((EXPERTS,), "ffn_down_exps.scale"),
            "pre_feedforward_layernorm_2.weight": ((D,), "pre_ffw_norm_2.weight"),
            "post_feedforward_layernorm_1.weight": ((D,), "post_ffw_norm_1.weight"),
            "post_feedforward_layernorm_2.weight": ((D,), "post_ffw_norm_2.weight"),
            "experts.gate_up_proj": ((EXPERTS, 40, D), "ffn_gate_up_exps.weight"),
            "experts.down_proj": ((EXPERTS, D, 20), "ffn_down_exps.weight"),
            **{name: (shape, f"{gguf}.weight") for name, (shape, gguf) in SANDWICH.items()},
        }
        if layer < 2:
            lines |= {
                "self_attn.k_proj.weight": ((kv, D), "attn_k.weight"),
                "self_attn.k_norm.weight": ((head,), "attn_k_norm.weight"),
            }
        if layer == 0:
            lines["self_attn.v_proj.weight"] = ((kv, D), "attn_v.weight")
        names |= {
            f"model.layers.{layer}.{name}": (shape, f"blk.{layer}.{gguf}")
            for name, (shape, gguf) in lines.items()
        }
    return names


def gemma4_tokenizer(folder: Path) -> None:
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<|turn>",
        "<|channel>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\u2581a",
    ]
    model = {
        "type": "BPE",
        "byte_fallback": True,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [["\u2581", "a"]],
    }
    added = [
        {"id": number, "content": token, "special": number < 5}
        for number, token in enumerate(tokens[:6])
    ]
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": added, "post_processor": None})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "sot_token": "<|turn>",
            }
        )
    )


def test_gemma4(tmp_path: Path):
    names = gemma4_names()
    shapes = shapes_of(names)
    # Of a layer that shares keys and values of another.
    unused = {"model.layers.2.self_attn.k_proj.weight": (KV, D)}
    stored = write(tmp_path, "Gemma4ForCausalLM", GEMMA4, shapes | unused)
    gemma4_tokenizer(tmp_path)
    made, metadata = convert(tmp_path)
    assert made.pop("rope_freqs.weight").tolist() == [1.0] * 3 + [pytest.approx(1e30)] * 9
    assert set(made) == {gguf for _, gguf in names.values()}
    for name, (_, gguf) in names.items():
        assert np.array_equal(made[gguf], stored[name]), name
    expected = {
        "attention.key_length": 24,
        "attention.key_length_swa": HEAD,
        "attention.head_count_kv": [2, 1, 2, 1],
        "feed_forward_length": [FF, FF, 2 * FF, 2 * FF],
        "attention.shared_kv_layers": 2,
        "rope.dimension_count": 24,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "attention.sliding_window_pattern": [True, False, True, False],
        "expert_used_count": 2,
        "expert_feed_forward_length": 20,
        "embedding_length_per_layer_input": 8,
    }
    assert {key: metadata[f"gemma4.{key}"] for key in expected} == expected
    tokens = {
        key: metadata[f"tokenizer.ggml.{key}"]
        for key in ("model", "token_type", "merges", "add_bos_token", "add_space_prefix")
    }
    assert tokens.pop("token_type")[:8] == [3, 3, 3, 3, 3, 4, 6, 6]
    assert tokens == {
        "model": "gemma4",
        "merges": ["\u2581 a"],
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    layered = {
        "global_head_dim": None,
        "num_global_key_value_heads": None,
        "per_layer_config": {
            str(layer): {"head_dim": 24, "num_key_value_heads": 1} for layer in (1, 3)
        },
    }
    write(tmp_path, "Gemma4ForCausalLM", GEMMA4 | layered, shapes)
    gemma4_tokenizer(tmp_path)
    again, newer = convert(tmp_path)
    assert {key: values.shape for key, values in again.items() if key != "rope_freqs.weight"} == {
        k: v.shape for k, v in made.items()
    }
    assert {key: newer[f"gemma4.{key}"] for key in expected} == expected
    for wrong, words in (
        ({"layer_types": GEMMA4_KINDS[:3]}, "layer_types"),
        ({"layer_types": ["x"] * 4}, "layer_types"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"top_k_experts": 9}, "top_k_experts"),
        (
            {"per_layer_config": {"1": {"head_dim": 24}, "3": {"head_dim": 32}}},
            "different head_dim",
        ),
    ):
        write(tmp_path, "Gemma4ForCausalLM", GEMMA4 | wrong, shapes)
        with pytest.raises(ConfigError, match=words):
            convert(tmp_path)


@pytest.mark.parametrize(
    "missing, words",
    [
        ("experts.down_proj", "layer 1 lacks experts"),
        ("router.scale", "router.scale': is missing"),
        ("layer_scalar", "layer_scalar': is missing"),
    ],
)
def test_gemma4_tensors_missing(tmp_path: Path, missing: str, words: str):
    shapes = {
        name: shape
        for name, (shape, _) in gemma4_names().items()
        if name != f"model.layers.1.{missing}"
    }
    write(tmp_path, "Gemma4ForCausalLM", GEMMA4, shapes)
    gemma4_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        convert(tmp_path)

"""Cohere's models, of both generations, from checkpoints made here."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import EMBEDDING, FF, HEADS, KV_HEADS, LAYER, VOCAB, D, convert, write
from .family_checks import check_missing, check_tensors, shapes_of
from .tiny_checkpoint import write_safetensors

HEAD = D // HEADS
CONFIG = {
    "head_dim": None,
    "rms_norm_eps": None,
    "layer_norm_eps": 1e-4,
    "logit_scale": 0.5,
}
COMMAND_R = CONFIG | {"use_qk_norm": True, "model_max_length": 128}
COHERE2 = CONFIG | {"sliding_window": 8, "rotary_pct": 1.0}
# stored name -> (shape, GGUF name)
NAMES = {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()} | {
    f"{LAYER}{stored}.weight": (shape, f"blk.0.{gguf}.weight")
    for stored, shape, gguf in (
        ("input_layernorm", (D,), "attn_norm"),
        ("self_attn.q_proj", (D, D), "attn_q"),
        ("self_attn.k_proj", (KV_HEADS * HEAD, D), "attn_k"),
        ("self_attn.v_proj", (KV_HEADS * HEAD, D), "attn_v"),
        ("self_attn.o_proj", (D, D), "attn_output"),
        ("mlp.gate_proj", (FF, D), "ffn_gate"),
        ("mlp.up_proj", (FF, D), "ffn_up"),
        ("mlp.down_proj", (D, FF), "ffn_down"),
    )
}
HEAD_NORMS = {
    f"{LAYER}self_attn.q_norm.weight": ((HEADS, HEAD), "blk.0.attn_q_norm.weight"),
    f"{LAYER}self_attn.k_norm.weight": ((KV_HEADS, HEAD), "blk.0.attn_k_norm.weight"),
}
CASES = {
    "CohereForCausalLM": (COMMAND_R, NAMES | HEAD_NORMS),
    "Cohere2ForCausalLM": (COHERE2, NAMES),
}


@pytest.mark.parametrize("hf_class", CASES)
def test_names_and_values(tmp_path, hf_class):
    config, names = CASES[hf_class]
    stored = write(tmp_path, hf_class, config, shapes_of(names))
    made, _ = convert(tmp_path)
    check_tensors(made, stored, names)
    for name in names:
        check_missing(tmp_path, hf_class, config, shapes_of(names), name)


def test_keys_of_command_r(tmp_path):
    write(tmp_path, "CohereForCausalLM", COMMAND_R, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    keys = {key: value for key, value in metadata.items() if key.startswith("command-r.")}
    assert keys == {
        "command-r.block_count": 1,
        "command-r.context_length": 128,
        "command-r.embedding_length": D,
        "command-r.feed_forward_length": FF,
        "command-r.attention.head_count": HEADS,
        "command-r.attention.head_count_kv": KV_HEADS,
        "command-r.rope.freq_base": 1e4,
        "command-r.attention.layer_norm_epsilon": pytest.approx(1e-4),
        "command-r.logit_scale": 0.5,
        "command-r.rope.scaling.type": "none",
    }


@pytest.mark.parametrize(
    "change, period",
    [
        ({}, None),
        ({"num_hidden_layers": 8, "sliding_window_pattern": 4}, None),
        ({"num_hidden_layers": 8, "sliding_window_pattern": 2}, 2),
        (
            {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            3,
        ),
    ],
)
def test_keys_of_cohere2(tmp_path, change, period):
    write(tmp_path, "Cohere2ForCausalLM", COHERE2 | change, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    keys = {
        "context_length": 64,
        "attention.layer_norm_epsilon": pytest.approx(1e-4),
        "logit_scale": 0.5,
        "attention.sliding_window": 8,
        "vocab_size": VOCAB,
        "rope.dimension_count": HEAD,
        "rope.scaling.type": "none",
    }
    assert {key: metadata[f"cohere2.{key}"] for key in keys} == keys
    assert metadata.get("cohere2.attention.sliding_window_pattern") == period
    assert "cohere2.attention.key_length" not in metadata


@pytest.mark.parametrize("value, words", [(0.0, ""), (-0.0, ""), (0.5, "is not zero; .* biases")])
def test_biases_of_zeros_are_left_out(tmp_path, value, words):
    """Some checkpoints store them, of which the class knows nothing."""
    stored = write(tmp_path, "Cohere2ForCausalLM", COHERE2, shapes_of(NAMES))
    bias = np.zeros(D, np.float32)
    bias[-1] = value
    stored[f"{LAYER}input_layernorm.bias"] = bias
    write_safetensors(tmp_path / "model.safetensors", stored)
    if words:
        with pytest.raises(CheckpointError, match=f"input_layernorm.bias': {words}"):
            convert(tmp_path)
    else:
        assert set(convert(tmp_path)[0]) == {gguf for _, gguf in NAMES.values()}


@pytest.mark.parametrize(
    "hf_class, change, words",
    [
        ("CohereForCausalLM", {"tie_word_embeddings": False}, "command-r implies true"),
        ("CohereForCausalLM", {"attention_bias": True}, "command-r implies false"),
        ("CohereForCausalLM", {"head_dim": 16}, "is 16; GGUF's command-r implies hidden_size 32"),
        ("CohereForCausalLM", {"rope_theta": None}, "'rope_theta' is missing"),
        (
            "CohereForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not supported",
        ),
        ("Cohere2ForCausalLM", {"rotary_pct": 0.5}, "is 0.5; GGUF's cohere2 implies 1"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "cohere2 implies false"),
        (
            "Cohere2ForCausalLM",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "not those of a fixed period",
        ),
    ],
)
def test_refused(tmp_path, hf_class, change, words):
    config = CASES[hf_class][0]
    write(tmp_path / "base", hf_class, config, {})
    convert(tmp_path / "base", vocab_only=True)
    write(tmp_path / "changed", hf_class, config | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path / "changed", vocab_only=True)

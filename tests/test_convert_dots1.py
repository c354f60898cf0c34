"""dots.llm1: a dense layer and one with experts, from a checkpoint made here."""

from __future__ import annotations

import pytest

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

CLASS = "Dots1ForCausalLM"
WIDE, SHARED = 20, 40  # hidden sizes of an expert and of the two shared ones together
CONFIG = {
    "num_hidden_layers": 2,
    "num_key_value_heads": HEADS,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}
for _layer in range(2):
    for _stored, _shape, _gguf in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (Q, D), "attn_k"),
        ("self_attn.v_proj", (Q, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}.weight"] = (
            _shape,
            f"blk.{_layer}.{_gguf}.weight",
        )
NAMES |= {
    "model.layers.0.mlp.gate_proj.weight": ((FF, D), "blk.0.ffn_gate.weight"),
    "model.layers.0.mlp.up_proj.weight": ((FF, D), "blk.0.ffn_up.weight"),
    "model.layers.0.mlp.down_proj.weight": ((D, FF), "blk.0.ffn_down.weight"),
    "model.layers.1.mlp.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
    "model.layers.1.mlp.gate.e_score_correction_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias"),
    "model.layers.1.mlp.shared_experts.gate_proj.weight": (
        (SHARED, D),
        "blk.1.ffn_gate_shexp.weight",
    ),
    "model.layers.1.mlp.shared_experts.up_proj.weight": ((SHARED, D), "blk.1.ffn_up_shexp.weight"),
    "model.layers.1.mlp.shared_experts.down_proj.weight": (
        (D, SHARED),
        "blk.1.ffn_down_shexp.weight",
    ),
}
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
STACKS = expert_stacks("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "dots1") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": WIDE,
        "leading_dense_block_count": 1,
        "expert_shared_count": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
    }


def test_what_the_config_leaves_out(tmp_path):
    """Defaults of the class, and keys that only a config with these settings gets."""
    left_out = (
        *("n_group", "topk_group", "norm_topk_prob"),
        *("routed_scaling_factor", "first_k_dense_replace"),
    )
    config = {key: value for key, value in CONFIG.items() if key not in left_out}
    write(tmp_path, CLASS, config | {"head_dim": None}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["dots1.expert_weights_norm"] is False
    assert metadata["dots1.expert_weights_scale"] == 1
    assert metadata["dots1.leading_dense_block_count"] == 0
    assert metadata["dots1.expert_gating_func"] == 2
    for key in ("expert_group_count", "expert_group_used_count", "attention.key_length"):
        assert f"dots1.{key}" not in metadata


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


def test_a_missing_expert_is_named(tmp_path):
    name, words = "model.layers.1.mlp.experts.1.up_proj.weight", "expert 1 has no up"
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, f"layer 1 lacks experts: {words}")


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, ""),
        ({"num_key_value_heads": HEADS // 2}, "with fewer key-value heads than heads"),
        ({"tie_word_embeddings": True}, "with no output matrix of its own"),
    ],
)
def test_files_that_others_refuse_are_announced(tmp_path, caplog, change, words):
    write(tmp_path, CLASS, CONFIG | change, {})
    convert(tmp_path, vocab_only=True)
    assert ("llama.cpp refuses GGUF's dots1" in caplog.text) == bool(words)
    assert words in caplog.text

"""MiniMax-M2: two layers with experts, from a checkpoint made here."""

from __future__ import annotations

import pytest
from iqforge.errors import CheckpointError

from .family_checkpoint import (
    EXPERTS,
    FF,
    HEAD,
    HEADS,
    KV,
    KV_HEADS,
    VOCAB,
    D,
    Q,
    convert,
    split_as,
    write,
)
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

CLASS = "MiniMaxM2ForCausalLM"
CONFIG = {  # as published: blocks that predict further tokens are announced, and none is there
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "attn_type_list": [1, 1],
    "use_mtp": True,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
}
for _layer in range(2):
    for _stored, _shape, _gguf in (
        ("input_layernorm.weight", (D,), "attn_norm.weight"),
        ("post_attention_layernorm.weight", (D,), "ffn_norm.weight"),
        ("self_attn.q_proj.weight", (Q, D), "attn_q.weight"),
        ("self_attn.k_proj.weight", (KV, D), "attn_k.weight"),
        ("self_attn.v_proj.weight", (KV, D), "attn_v.weight"),
        ("self_attn.o_proj.weight", (D, Q), "attn_output.weight"),
        ("self_attn.q_norm.weight", (Q,), "attn_q_norm.weight"),
        ("self_attn.k_norm.weight", (KV,), "attn_k_norm.weight"),
        ("block_sparse_moe.gate.weight", (EXPERTS, D), "ffn_gate_inp.weight"),
        ("block_sparse_moe.e_score_correction_bias", (EXPERTS,), "exp_probs_b.bias"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}"] = _shape, f"blk.{_layer}.{_gguf}"
STACKS = expert_stacks(
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
    {"gate": (FF, D), "up": (FF, D), "down": (D, FF)},
    range(2),
    called={"gate": "w1", "up": "w3", "down": "w2"},
)
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path):
    further = {f"model.layers.{layer}.self_attn.q_proj.weight": (Q, D) for layer in (2, 4)}
    stored = write(tmp_path, CLASS, CONFIG, SHAPES | further)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "minimax-m2") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "rope.dimension_count": 8,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_gating_func": 2,
        "expert_feed_forward_length": FF,
    }


def test_what_the_config_leaves_out(tmp_path):
    """Defaults of the class; transformers 5 writes the rotated part as a share."""
    left_out = dict.fromkeys(
        ("rotary_dim", "head_dim", "rope_theta", "rms_norm_eps", "num_key_value_heads")
    )
    config = CONFIG | left_out | {"num_attention_heads": 8}
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    for more, base, rotated in (({}, 5e6, 128), ({"rope_parameters": rope}, 5e6, 64)):
        write(tmp_path, CLASS, config | more, {})
        _, metadata = convert(tmp_path, vocab_only=True)
        assert metadata["minimax-m2.attention.head_count_kv"] == 8
        assert metadata["minimax-m2.attention.key_length"] == 128
        assert metadata["minimax-m2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
        assert metadata["minimax-m2.rope.freq_base"] == base
        assert metadata["minimax-m2.rope.dimension_count"] == rotated


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


def test_norms_of_single_heads_are_refused(tmp_path):
    name = "model.layers.0.self_attn.q_norm.weight"
    write(tmp_path, CLASS, CONFIG, SHAPES | {name: (HEAD,)})
    with pytest.raises(CheckpointError, match=rf"q_norm.*\[{HEAD}\].*\[{Q}\]"):
        convert(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_files_that_others_refuse_are_announced(tmp_path, caplog, tied):
    write(tmp_path, CLASS, CONFIG | {"tie_word_embeddings": tied}, {})
    convert(tmp_path, vocab_only=True)
    assert ("with no output matrix of its own" in caplog.text) == tied


def test_the_pre_tokenizer_has_the_name_of_the_model(tmp_path):
    """GPT-4o's splits by the same regex."""
    write(tmp_path, CLASS, CONFIG, {})
    split_as(tmp_path, "gpt-4o")
    for pre, name in ((None, "minimax-m2"), ("gpt-4o", "gpt-4o")):
        assert convert(tmp_path, vocab_only=True, pre=pre)[1]["tokenizer.ggml.pre"] == name

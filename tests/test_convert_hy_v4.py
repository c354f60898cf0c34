"""Hy4 from checkpoints made here, as it is published and as transformers saves it."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import EXPERTS, FF, HEADS, VOCAB, D, convert, write
from .family_checks import check_missing, check_tensors, dense_rows, keys_of, shapes_of

CLASS = "HYV4ForCausalLM"
STREAMS, RANK, Q_RANK, NOPE, ROPE, VALUE, EXPERT = 3, 24, 20, 12, 4, 16, 20
INDEX, INDEX_HEADS, WIDE = 6, 2, 3 * D
CONFIG = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,  # which says nothing
    "head_dim": ROPE,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["deepseek_sparse_attention"] * 2,
    "indexer_types": ["full", "shared"],
    "kv_lora_rank": RANK,
    "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "index_topk": 8,
    "index_head_dim": INDEX,
    "index_n_heads": INDEX_HEADS,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "swiglu_limit": 7.0,
    "hc_mult": STREAMS,
    "hc_eps": 1e-6,
    "hc_magnitude": 2.0,
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "num_nextn_predict_layers": 1,
}
LAYER = {
    "input_layernorm.weight": ((D,), "attn_norm.weight"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
    "self_attn.q_a_proj.weight": ((Q_RANK, D), "attn_q_a.weight"),
    "self_attn.q_a_layernorm.weight": ((Q_RANK,), "attn_q_a_norm.weight"),
    "self_attn.q_b_proj.weight": ((HEADS * (NOPE + ROPE), Q_RANK), "attn_q_b.weight"),
    "self_attn.kv_a_proj_with_mqa.weight": ((RANK + ROPE, D), "attn_kv_a_mqa.weight"),
    "self_attn.kv_a_layernorm.weight": ((RANK,), "attn_kv_a_norm.weight"),
    "self_attn.o_proj.weight": ((D, HEADS * VALUE), "attn_output.weight"),
    "self_attn.linear_gate.weight": ((HEADS * VALUE, D), "attn_gate.weight"),
    "self_attn.learnable_sink_param": ((HEADS,), "attn_sinks.weight"),
}
for _half, _gguf in (("attn", "attn"), ("mlp", "ffn")):
    for _part, _shape in (("fn", (2 * STREAMS, WIDE)), ("base", (2 * STREAMS,)), ("scale", (2,))):
        LAYER[f"hc_{_half}_layer.hc_pre.hc_{_part}"] = (_shape, f"hc_{_gguf}_{_part}.weight")
INDEXER = {
    "self_attn.indexer.k_norm.weight": ((INDEX,), "indexer.k_norm.weight"),
    "self_attn.indexer.k_norm.bias": ((INDEX,), "indexer.k_norm.bias"),
    "self_attn.indexer.wk.weight": ((INDEX, D), "indexer.attn_k.weight"),
    "self_attn.indexer.weights_proj.weight": ((INDEX_HEADS, D), "indexer.proj.weight"),
    "self_attn.indexer.wq_b.weight": ((INDEX_HEADS * INDEX, Q_RANK), "indexer.attn_q_b.weight"),
}
SPARSE = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "mlp.gate.e_score_correction_bias": ((EXPERTS,), "exp_probs_b.bias"),
    **dense_rows(D, EXPERT, "mlp.shared_experts.", "_shexp"),
}
NAMES: dict = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.hc_head.hc_head_fn": ((STREAMS, WIDE), "output_hc_fn.weight"),
    "model.hc_head.hc_head_base": ((STREAMS,), "output_hc_base.weight"),
    "model.hc_head.hc_head_scale": ((1,), "output_hc_scale.weight"),
}
for _layer, _rows in enumerate((LAYER | INDEXER | dense_rows(D, FF), LAYER | SPARSE)):
    for _name, (_shape, _gguf) in _rows.items():
        NAMES[f"model.layers.{_layer}.{_name}"] = _shape, f"blk.{_layer}.{_gguf}"
KV_B = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)]
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{x}_proj" for x in ("gate_up", "down"))
SHAPES = {
    **shapes_of(NAMES),
    **dict.fromkeys(KV_B, (HEADS * (NOPE + VALUE), RANK)),
    GATE_UP: (EXPERTS, 2 * EXPERT, D),
    DOWN: (EXPERTS, D, EXPERT),
}
FURTHER = {"model.mtp_layers.0.eh_proj.weight": (D, 2 * D)}
KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": D,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "attention.q_lora_rank": Q_RANK,
    "attention.kv_lora_rank": RANK,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
    "rope.freq_base": 1e4,
    "rope.dimension_count": ROPE,
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX,
    "attention.indexer.top_k": 8,
    "attention.indexer.types": [True, False],
    "hyper_connection.count": STREAMS,
    "hyper_connection.epsilon": pytest.approx(1e-6),
    "hyper_connection.magnitude": 2.0,
    "leading_dense_block_count": 1,
    "vocab_size": VOCAB,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_gating_func": 2,
    "expert_feed_forward_length": EXPERT,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "swiglu_clamp_exp": [7.0] * 2,
}


def saved_name(name: str) -> str:
    """Return the name that transformers gives to a published tensor when it saves it."""
    for half in ("attn", "mlp"):
        name = name.replace(f".hc_{half}_layer.hc_pre.", f".hc_pre.hc_{half}_layer.")
    name = name.replace("hc_head.hc_head_", "hc_head.hc_pre.hc_head_")
    return name.replace(".gate_proj.", ".linear_gate.")


@pytest.mark.parametrize("saved", [False, True])
def test_tensors_and_keys(tmp_path, saved):
    """Blocks that predict further tokens are left out."""
    shapes = SHAPES | FURTHER
    if saved:
        shapes = {saved_name(name): shape for name, shape in shapes.items()}
    stored = write(tmp_path, CLASS, CONFIG, shapes)
    stored = {name: stored[saved_name(name) if saved else name] for name in SHAPES}
    made, metadata = convert(tmp_path)
    for layer, name in enumerate(KV_B):
        k, v = np.split(stored[name].reshape(HEADS, NOPE + VALUE, RANK), [NOPE], axis=1)
        assert np.array_equal(made.pop(f"blk.{layer}.attn_k_b.weight"), k.swapaxes(1, 2))
        assert np.array_equal(made.pop(f"blk.{layer}.attn_v_b.weight"), v)
    gate, up = np.split(stored[GATE_UP], 2, axis=1)
    for part, values in (("gate", gate), ("up", up), ("down", stored[DOWN])):
        assert np.array_equal(made.pop(f"blk.1.ffn_{part}_exps.weight"), values)
    check_tensors(made, stored, NAMES)
    assert keys_of(metadata, "hy_v4") == KEYS


def test_what_the_class_assumes(tmp_path):
    left_out = ("indexer_types", "swiglu_limit", "hc_mult", "hc_magnitude", "n_group", "topk_group")
    config = {"mlp_layer_types": None, "layer_types": None, "first_k_dense_replace": 1}
    changed = CONFIG | dict.fromkeys(left_out) | config | {"num_hidden_layers": 6}
    write(tmp_path, CLASS, changed, {})
    keys = keys_of(convert(tmp_path, vocab_only=True)[1], "hy_v4")
    assert keys["attention.indexer.types"] == [True, True, False, False, False, True]
    assert keys["swiglu_clamp_exp"] == [10.0] * 6 and keys["hyper_connection.count"] == 4
    assert keys["hyper_connection.magnitude"] == 2.0
    write(tmp_path, CLASS, changed | {"swiglu_limit": 0.0}, {})
    assert "hy_v4.swiglu_clamp_exp" not in convert(tmp_path, vocab_only=True)[1]


@pytest.mark.parametrize("name", [*NAMES, *KV_B])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"enable_ihc": False}, "'enable_ihc' is false"),
        ({"gated_mla": False}, "'gated_mla' is false"),
        ({"gating_type": "headwise"}, "'gating_type' is 'headwise'"),
        ({"learnable_sink": False}, "'learnable_sink' is false"),
        ({"use_dsa": False}, "'use_dsa' is false"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
        ({"hc_mult": 1}, "'hc_mult' is 1"),
        ({"indexer_types": ["shared", "full"]}, "that the first layer has no indexer"),
        ({"indexer_types": ["full"]}, "'indexer_types' must say full or shared for each of 2"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
        ({"hidden_act": "gelu"}, "GGUF's hy_v4 implies silu"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, CLASS, CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)

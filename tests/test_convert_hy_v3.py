"""Hunyuan 3: a dense layer, one with experts, and the block that predicts further tokens, from a
checkpoint made here.
"""

from __future__ import annotations

import pytest
from iqforge.errors import ConfigError

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

CLASS, WIDE = "HYV3ForCausalLM", 20
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "expert_hidden_dim": WIDE,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": WIDE,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 2,
    "qk_norm": True,
    "route_norm": True,
    "router_scaling_factor": 2.5,
}
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.2.eh_proj.weight": ((D, 2 * D), "blk.2.nextn.eh_proj.weight"),
    "model.layers.2.enorm.weight": ((D,), "blk.2.nextn.enorm.weight"),
    "model.layers.2.hnorm.weight": ((D,), "blk.2.nextn.hnorm.weight"),
    "model.layers.2.final_layernorm.weight": ((D,), "blk.2.nextn.shared_head_norm.weight"),
}
for _layer in range(3):
    for _stored, _shape, _gguf in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "ffn_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}.weight"] = _shape, f"blk.{_layer}.{_gguf}.weight"
    _stem, _suffix, _width = ("mlp.shared_mlp", "_shexp", 2 * WIDE) if _layer else ("mlp", "", FF)
    for _part, _shape in (("gate", (_width, D)), ("up", (_width, D)), ("down", (D, _width))):
        NAMES[f"model.layers.{_layer}.{_stem}.{_part}_proj.weight"] = (
            _shape,
            f"blk.{_layer}.ffn_{_part}{_suffix}.weight",
        )
for _layer in (1, 2):
    _at = f"model.layers.{_layer}.mlp"
    NAMES[f"{_at}.router.gate.weight"] = (EXPERTS, D), f"blk.{_layer}.ffn_gate_inp.weight"
    # As in llama.cpp's files, without `.bias`.
    NAMES[f"{_at}.expert_bias"] = (EXPERTS,), f"blk.{_layer}.exp_probs_b"
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
SHAPES = shapes_of(NAMES, expert_stacks(EXPERT, PARTS, [1, 2]))


@pytest.mark.parametrize("mtp", ["keep", "drop", "only"])
def test_names_values_and_keys(tmp_path, mtp):
    """With the block that predicts further tokens, without it, and it alone."""
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path, mtp=mtp)
    layers = {"keep": [0, 1, 2], "drop": [0, 1], "only": [2]}[mtp]
    names = {
        name: found
        for name, found in NAMES.items()
        if "layers." not in name or int(name.split(".")[2]) in layers
    }
    check_tensors(made, stored, names, expert_stacks(EXPERT, PARTS, [x for x in layers if x > 0]))
    further = {} if mtp == "drop" else {"nextn_predict_layers": 1}
    assert keys_of(metadata, "hy_v3") == {
        "block_count": 2 + len(further),
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.freq_base": 1e4,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": WIDE,
        "expert_shared_feed_forward_length": 2 * WIDE,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        **further,
    }


def test_what_the_config_leaves_out(tmp_path):
    """Defaults of the class: Hy3's sizes."""
    left_out = (
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "expert_hidden_dim"),
        *("num_shared_experts", "router_scaling_factor", "first_k_dense_replace"),
    )
    config = {key: value for key, value in CONFIG.items() if key not in left_out}
    more = {"head_dim": None, "num_key_value_heads": None, "rope_theta": None}
    write(tmp_path, CLASS, config | more | {"num_attention_heads": 64}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    keys = keys_of(metadata, "hy_v3")
    assert keys["attention.key_length"] == 128 and keys["attention.head_count_kv"] == 8
    assert keys["rope.freq_base"] == pytest.approx(11158840.0)
    assert (keys["expert_count"], keys["expert_used_count"]) == (192, 8)
    assert keys["expert_feed_forward_length"] == 1536
    assert keys["expert_shared_feed_forward_length"] == 1536
    assert keys["expert_weights_scale"] == pytest.approx(2.826)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "layers.1" not in name or "mlp" in name]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    words = "is missing" if "final_layernorm" in name else None  # it has a usual name by then
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, words)


def test_a_missing_expert_is_named(tmp_path):
    name = EXPERT.format(layer=2, expert=1, part="down")
    words = "layer 2 lacks experts: expert 1 has no down"
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense"]}, "must say"),
        ({"mlp_layer_types": ["dense", "dense"]}, "1 by 'first_k_dense_replace' and 2"),
        ({"expert_hidden_dim": 24}, "'expert_hidden_dim' is 24"),
        ({"route_norm": False}, "'route_norm' is false"),
        ({"qk_norm": False}, "'qk_norm' is false"),
        ({"moe_router_use_sigmoid": False}, "'moe_router_use_sigmoid' is false"),
        ({"moe_router_enable_expert_bias": False}, "'moe_router_enable_expert_bias' is false"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"mlp_bias": True}, "'mlp_bias' is true"),
        ({"num_shared_experts": 0}, "'num_shared_experts' is 0"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope type 'llama3'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_the_pre_tokenizer_has_a_name_of_its_own(tmp_path):
    write(tmp_path, CLASS, CONFIG, {})
    split_as(tmp_path, "deepseek-v3")
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["tokenizer.ggml.pre"] == "hunyuan-dense"

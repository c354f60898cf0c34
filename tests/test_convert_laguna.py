"""Laguna from checkpoints made here: names, keys, vocabulary, and what is refused."""

from __future__ import annotations

import json

import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import (
    EXPERTS,
    FF,
    HEAD,
    KV,
    KV_HEADS,
    VOCAB,
    D,
    convert,
    write,
)
from .family_checks import (
    check_missing,
    check_tensors,
    dense_rows,
    expert_stacks,
    keys_of,
    shapes_of,
)

CLASS, WIDE, SHARED = "LagunaForCausalLM", 20, 12
NEAR, FAR = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.25,
    "partial_rotary_factor": 0.5,
}
ROTATIONS = {FAR: YARN, NEAR: {"rope_type": "default", "rope_theta": 1e4}}
HEADS = [4, 6]
CONFIG = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "num_attention_heads_per_layer": HEADS,
    "layer_types": [FAR, NEAR],
    "mlp_layer_types": ["dense", "sparse"],
    "gating": "per-head",
    "sliding_window": 9,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "shared_expert_intermediate_size": SHARED,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0,
    "rope_theta": None,
    "rope_parameters": ROTATIONS,
}


def names_of(gate: int) -> dict:
    """Return {stored name: (shape, GGUF name)}. gate: elements of the gate of a head."""
    names = {
        "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
        "model.norm.weight": ((D,), "output_norm.weight"),
        "lm_head.weight": ((VOCAB, D), "output.weight"),
    }
    for layer, heads in enumerate(HEADS):
        q = heads * HEAD
        parts = {
            "input_layernorm.weight": ((D,), "attn_norm.weight"),
            "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
            "self_attn.q_proj.weight": ((q, D), "attn_q.weight"),
            "self_attn.k_proj.weight": ((KV, D), "attn_k.weight"),
            "self_attn.v_proj.weight": ((KV, D), "attn_v.weight"),
            "self_attn.o_proj.weight": ((D, q), "attn_output.weight"),
            "self_attn.g_proj.weight": ((heads * gate, D), "attn_gate.weight"),
            "self_attn.q_norm.weight": ((HEAD,), "attn_q_norm.weight"),
            "self_attn.k_norm.weight": ((HEAD,), "attn_k_norm.weight"),
        }
        if layer == 0:
            parts |= dense_rows(D, FF)
        else:
            parts |= dense_rows(D, SHARED, "mlp.shared_expert.", "_shexp") | {
                "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
                "mlp.experts.e_score_correction_bias": ((EXPERTS,), "exp_probs_b.bias"),
            }
        for name, (shape, gguf) in parts.items():
            names[f"model.layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return names


NAMES = names_of(1)
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
STACKS = expert_stacks(EXPERT, PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)


@pytest.mark.parametrize(("gating", "gate"), [("per-head", 1), (True, 1), ("per-element", HEAD)])
def test_names_values_and_keys(tmp_path, gating, gate):
    names = names_of(gate)
    stored = write(tmp_path, CLASS, CONFIG | {"gating": gating}, shapes_of(names, STACKS))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, STACKS)
    assert keys_of(metadata, "laguna") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.sliding_window": 9,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": HEAD // 2,
        "rope.dimension_count_swa": HEAD,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_attn_factor": 1.25,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": WIDE,
        "expert_shared_feed_forward_length": SHARED,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        "vocab_size": VOCAB,
    }


def test_names_within_transformers(tmp_path):
    names = {
        name.replace("experts.e_score", "gate.e_score").replace("_expert.", "_experts."): found
        for name, found in NAMES.items()
    }
    stored = write(tmp_path, CLASS, CONFIG, shapes_of(names, STACKS))
    check_tensors(convert(tmp_path)[0], stored, names, STACKS)


@pytest.mark.parametrize(
    ("kinds", "window", "pattern"),
    [([FAR, FAR], None, None), ([NEAR, FAR], 9, [True, False]), (None, None, None)],
)
def test_other_layers_with_a_window(tmp_path, kinds, window, pattern):
    write(tmp_path, CLASS, CONFIG | {"layer_types": kinds}, SHAPES)
    keys = keys_of(convert(tmp_path)[1], "laguna")
    assert keys.get("attention.sliding_window") == window
    assert keys.get("attention.sliding_window_pattern") == pattern


def test_the_end_of_a_turn(tmp_path):
    """It is a control token, and the first end of a text that does not begin texts."""
    write(tmp_path, CLASS, CONFIG | {"bos_token_id": 2, "eos_token_id": [2, 301]}, {})
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    token = {"id": 301, "content": "</assistant>", "special": False, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    others = [added for added in tokenizer.get("added_tokens", []) if added["id"] != 301]
    vocabulary = {x: n for x, n in tokenizer["model"]["vocab"].items() if n != 301}
    tokenizer["model"]["vocab"] = vocabulary
    tokenizer["model"]["merges"] = []
    file.write_text(json.dumps(tokenizer | {"added_tokens": [*others, token]}))
    included = {"chat_template": "{% include 'chat_template.jinja' %}"}
    config = tmp_path / "tokenizer_config.json"
    known = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(known | included))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    metadata = convert(tmp_path, vocab_only=True)[1]
    assert metadata["tokenizer.ggml.tokens"][301] == "</assistant>"
    assert metadata["tokenizer.ggml.token_type"][301] == 3
    assert metadata["tokenizer.ggml.eot_token_id"] == 301
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


def test_a_missing_expert_is_named(tmp_path):
    name = EXPERT.format(layer=1, expert=2, part="up")
    words = "layer 1 lacks experts: expert 2 has no up"
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gating": False}, "'gating' is False, expected true, per-head or per-element"),
        ({"gating_types": ["per_head", "per_element"]}, "'gating_types' has other gates than"),
        ({"layer_types": [NEAR]}, "'layer_types' must name"),
        ({"num_attention_heads_per_layer": [4, 5]}, "'num_attention_heads_per_layer' must have"),
        ({"num_attention_heads_per_layer": [4]}, "'num_attention_heads_per_layer' must have"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "'mlp_layer_types' must say"),
        ({"mlp_only_layers": [0, 1]}, r"'mlp_only_layers' is \[0, 1\], but the first 1"),
        ({"moe_router_logit_softcapping": 5.0}, "'moe_router_logit_softcapping' is 5"),
        ({"moe_apply_router_weight_on_input": True}, "weight_on_input' is true"),
        ({"moe_router_score_func": "softmax"}, "implies sigmoid"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is false"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"rope_parameters": {NEAR: ROTATIONS[NEAR]}}, "'rope_parameters' has no 'full_attention'"),
        ({"rope_parameters": {FAR: YARN, NEAR: YARN}}, f"{NEAR}.rope_type' is 'yarn'"),
        ({"rope_parameters": {FAR: YARN | {"rope_type": "llama3"}}}, "rope type 'llama3'"),
        ({"rope_parameters": {FAR: YARN | {"truncate": False}}}, "truncate' is false"),
        (
            {"rope_parameters": {FAR: YARN | {"partial_rotary_factor": 0.2}}},
            "no even number",
        ),
        ({"sliding_window": 0}, "'sliding_window' is 0"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)

"""Mellum 2 from checkpoints made here: names, keys, and what is refused."""

from __future__ import annotations

import json

import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

CLASS, WIDE = "MellumForCausalLM", 20
NEAR, FAR = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROTATIONS = {FAR: YARN, NEAR: {"rope_type": "default", "rope_theta": 1e4}}
CONFIG = {
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "layer_types": [NEAR, FAR],
    "mlp_layer_types": ["sparse", "sparse"],
    "sliding_window": 9,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "norm_topk_prob": True,
    "rope_theta": None,
    "rope_parameters": ROTATIONS,
}
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
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
        ("mlp.gate", (EXPERTS, D), "ffn_gate_inp"),
    ):
        NAMES[f"model.layers.{_layer}.{_stored}.weight"] = _shape, f"blk.{_layer}.{_gguf}.weight"
PARTS = {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)}
EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
STACKS = expert_stacks(EXPERT, PARTS, [0, 1])
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path):
    """Blocks that predict further tokens are left out."""
    further = {"mtp.fc.weight": (D, 2 * D), "mtp.layers.0.mlp.gate.weight": (EXPERTS, D)}
    stored = write(tmp_path, CLASS, CONFIG, SHAPES | further)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "mellum") == {
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
        "attention.sliding_window_pattern": [True, False],
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": WIDE,
    }


def test_keys_of_the_class(tmp_path):
    absent = ("layer_types", "mlp_layer_types", "sliding_window", "rope_parameters")
    write(tmp_path, CLASS, CONFIG | dict.fromkeys(absent), SHAPES)
    keys = keys_of(convert(tmp_path)[1], "mellum")
    assert keys["attention.sliding_window"] == 1024
    assert keys["attention.sliding_window_pattern"] == [False, False]
    assert keys["rope.freq_base"] == 5e5 and keys["rope.freq_base_swa"] == 1e4


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [NEAR]}, "'layer_types' must name"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "'mlp_layer_types' must name sparse"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is false"),
        ({"attention_bias": True}, "'attention_bias' is true"),
        ({"use_sliding_window": False}, "'use_sliding_window' is false"),
        (
            {"rope_parameters": {FAR: YARN | {"partial_rotary_factor": 0.5}}},
            "rotates whole heads",
        ),
        ({"rope_parameters": {FAR: YARN, NEAR: YARN}}, f"{NEAR}.rope_type' is 'yarn'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


@pytest.mark.parametrize("kinds", [[NEAR, FAR], [FAR, FAR]])
def test_no_window(tmp_path, kinds):
    write(tmp_path, CLASS, CONFIG | {"layer_types": kinds}, SHAPES)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": None}))
    if NEAR in kinds:
        with pytest.raises(ConfigError, match="'sliding_window' is null"):
            convert(tmp_path)
    else:
        assert "attention.sliding_window" not in keys_of(convert(tmp_path)[1], "mellum")

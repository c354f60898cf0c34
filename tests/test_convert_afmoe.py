"""Arcee's Trinity: a dense layer and one with experts, from a checkpoint made here."""

from __future__ import annotations

import json

import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV, KV_HEADS, VOCAB, D, Q, convert, write
from .family_checks import check_missing, check_tensors, expert_stacks, keys_of, shapes_of

CLASS, OF_EXPERT = "AfmoeForCausalLM", 24
CONFIG = {  # as published
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "moe_intermediate_size": OF_EXPERT,
    "num_dense_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
    "n_group": 1,
    "topk_group": 1,
    "route_norm": True,
    "route_scale": 2.5,
    "score_func": "sigmoid",
    "mup_enabled": True,
    "global_attn_every_n_layers": 4,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
}
PERIOD = "the period of layers with full attention is 2; GGUF's afmoe implies 4"
# stored name -> (shape, GGUF name)
NAMES = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.norm.weight": ((D,), "output_norm.weight"),
    "lm_head.weight": ((VOCAB, D), "output.weight"),
    "model.layers.1.mlp.router.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
    "model.layers.1.mlp.expert_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias"),
}
for _layer, _stored, _gguf, _width in (
    (0, "", "", FF),
    (1, "shared_experts.", "_shexp", OF_EXPERT),
):
    for _name, _shape, _to in (
        ("input_layernorm", (D,), "attn_norm"),
        ("post_attention_layernorm", (D,), "post_attention_norm"),
        ("pre_mlp_layernorm", (D,), "ffn_norm"),
        ("post_mlp_layernorm", (D,), "post_ffw_norm"),
        ("self_attn.q_proj", (Q, D), "attn_q"),
        ("self_attn.k_proj", (KV, D), "attn_k"),
        ("self_attn.v_proj", (KV, D), "attn_v"),
        ("self_attn.gate_proj", (Q, D), "attn_gate"),
        ("self_attn.o_proj", (D, Q), "attn_output"),
        ("self_attn.q_norm", (HEAD,), "attn_q_norm"),
        ("self_attn.k_norm", (HEAD,), "attn_k_norm"),
        (f"mlp.{_stored}gate_proj", (_width, D), f"ffn_gate{_gguf}"),
        (f"mlp.{_stored}up_proj", (_width, D), f"ffn_up{_gguf}"),
        (f"mlp.{_stored}down_proj", (D, _width), f"ffn_down{_gguf}"),
    ):
        NAMES[f"model.layers.{_layer}.{_name}.weight"] = _shape, f"blk.{_layer}.{_to}.weight"
PARTS = {"gate": (OF_EXPERT, D), "up": (OF_EXPERT, D), "down": (D, OF_EXPERT)}
STACKS = expert_stacks("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS)
    assert keys_of(metadata, "afmoe") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.sliding_window": 16,
        "rope.freq_base": 1e4,
        "rope.dimension_count": HEAD,
        "vocab_size": VOCAB,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": OF_EXPERT,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "layers.1" in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mup_enabled": False}, "embeddings are scaled"),
        ({"mup_enabled": None}, "embeddings are scaled"),
        ({"attention_bias": True}, "afmoe implies false"),
        ({"route_norm": False}, "afmoe implies true"),
        ({"score_func": "softmax"}, "afmoe implies sigmoid"),
        ({"n_group": 2}, "'n_group' is 2; GGUF's afmoe implies 1"),
        ({"layer_types": None, "global_attn_every_n_layers": 2}, PERIOD),
        ({"layer_types": ["sliding_attention", "full_attention"]}, PERIOD),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)


def test_no_window_is_refused(tmp_path):
    """An absent key means the default of the class, null does not."""
    write(tmp_path, CLASS, CONFIG | {"sliding_window": None}, {})
    assert convert(tmp_path, vocab_only=True)[1]["afmoe.attention.sliding_window"] == 1024
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'sliding_window' is null; GGUF's afmoe implies a win"):
        convert(tmp_path, vocab_only=True)

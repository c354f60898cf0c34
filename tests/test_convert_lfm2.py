"""LFM2: layers of both kinds, with experts and without, from checkpoints made here."""

from __future__ import annotations

import pytest
from iqforge.errors import CheckpointError, ConfigError

from .family_checkpoint import EXPERTS, FF, HEAD, HEADS, KV, VOCAB, D, Q, convert, write
from .family_checks import check_tensors, expert_stacks, shapes_of

TAPS, WIDE = 3, 20  # WIDE: hidden size of an expert
CONFIG = {
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
    "rope_theta": None,
    "block_auto_adjust_ff_dim": False,
}
MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDE,
    "num_dense_layers": 1,
}
# stored name -> (shape, GGUF name)
COMMON = {
    "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
    "model.embedding_norm.weight": ((D,), "token_embd_norm.weight"),
} | {
    f"model.layers.{layer}.{stored}.weight": (shape, f"blk.{layer}.{gguf}.weight")
    for layer, stored, shape, gguf in (
        *((layer, "operator_norm", (D,), "attn_norm") for layer in range(2)),
        *((layer, "ffn_norm", (D,), "ffn_norm") for layer in range(2)),
        (0, "conv.in_proj", (3 * D, D), "shortconv.in_proj"),
        (0, "conv.conv", (D, 1, TAPS), "shortconv.conv"),
        (0, "conv.out_proj", (D, D), "shortconv.out_proj"),
        (1, "self_attn.q_proj", (Q, D), "attn_q"),
        (1, "self_attn.k_proj", (KV, D), "attn_k"),
        (1, "self_attn.v_proj", (KV, D), "attn_v"),
        (1, "self_attn.out_proj", (D, Q), "attn_output"),
        (1, "self_attn.q_layernorm", (HEAD,), "attn_q_norm"),
        (1, "self_attn.k_layernorm", (HEAD,), "attn_k_norm"),
    )
}


def dense(layer: int) -> dict:
    at = f"model.layers.{layer}.feed_forward"
    return {
        f"{at}.w1.weight": ((FF, D), f"blk.{layer}.ffn_gate.weight"),
        f"{at}.w3.weight": ((FF, D), f"blk.{layer}.ffn_up.weight"),
        f"{at}.w2.weight": ((D, FF), f"blk.{layer}.ffn_down.weight"),
    }


DENSE = COMMON | dense(0) | dense(1)
SPARSE_AT = "model.layers.1.feed_forward"
SPARSE = (
    COMMON
    | dense(0)
    | {
        f"{SPARSE_AT}.gate.weight": ((EXPERTS, D), "blk.1.ffn_gate_inp.weight"),
        f"{SPARSE_AT}.expert_bias": ((EXPERTS,), "blk.1.exp_probs_b.bias"),
    }
)
STACKS = expert_stacks(
    f"{SPARSE_AT}.experts.{{expert}}.{{part}}.weight",
    {"gate": (WIDE, D), "up": (WIDE, D), "down": (D, WIDE)},
    [1],
    called={"gate": "w1", "up": "w3", "down": "w2"},
)


@pytest.mark.parametrize("hf_class", ["Lfm2ForCausalLM", "Lfm2MoeForCausalLM"])
def test_tensors_and_keys(tmp_path, hf_class):
    names, experts = (SPARSE, STACKS) if "Moe" in hf_class else (DENSE, {})
    shapes = shapes_of(names, experts)
    stored = write(tmp_path, hf_class, CONFIG | (MOE if experts else {}), shapes)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, experts, lambda _, x: x[:, 0] if x.ndim == 3 else x)
    a = metadata["general.architecture"]
    assert a == ("lfm2moe" if experts else "lfm2")
    keys = {
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, 2],
        "feed_forward_length": FF,
        "shortconv.l_cache": TAPS,
        "rope.freq_base": 1e6,
    }
    if experts:
        keys |= {"expert_feed_forward_length": WIDE, "leading_dense_block_count": 1}
        keys |= {"expert_gating_func": 2}
    assert {key: metadata[f"{a}.{key}"] for key in keys} == keys
    (tmp_path / "model.safetensors").unlink()
    gone = f"{SPARSE_AT}.expert_bias" if experts else "model.layers.0.conv.conv.weight"
    write(tmp_path, hf_class, CONFIG | (MOE if experts else {}), shapes | {gone: (1, 1, 1, 1)})
    with pytest.raises(CheckpointError, match=r"has shape \[1, 1, 1, 1\]"):
        convert(tmp_path)


@pytest.mark.parametrize(
    "config, width",
    [
        ({"block_ff_dim": 12288, "block_multiple_of": 256}, 8192),  # as of 1.2B
        ({"block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0}, 4608),  # 350M
        ({"intermediate_size": 10752, "block_auto_adjust_ff_dim": False}, 10752),  # 2.6B
    ],
)
def test_widths_of_feed_forward_layers(tmp_path, config, width):
    write(tmp_path, "Lfm2ForCausalLM", CONFIG | {"block_auto_adjust_ff_dim": True} | config, {})
    assert convert(tmp_path, vocab_only=True)[1]["lfm2.feed_forward_length"] == width


def test_layers_by_number(tmp_path):
    """As early checkpoints say which have attention."""
    write(tmp_path, "Lfm2ForCausalLM", CONFIG | {"layer_types": None, "full_attn_idxs": [1]}, {})
    _, metadata = convert(tmp_path, vocab_only=True)
    assert metadata["lfm2.attention.head_count_kv"] == [0, 2]


@pytest.mark.parametrize(
    "config, words",
    [
        ({"conv_bias": True}, "lfm2moe implies false"),
        ({"use_expert_bias": False}, "lfm2moe implies true"),
        ({"norm_topk_prob": False}, "lfm2moe implies true"),
        ({"routed_scaling_factor": 2.0}, "is 2; GGUF's lfm2moe implies 1"),
        ({"layer_types": ["conv"]}, "1 items; expected 2 times"),
        ({"layer_types": ["conv", "sliding_attention"]}, "one of them 'sliding_attention'"),
    ],
)
def test_settings_that_are_refused(tmp_path, config, words):
    write(tmp_path, "Lfm2MoeForCausalLM", CONFIG | MOE | config, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)

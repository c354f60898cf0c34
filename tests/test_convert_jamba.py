"""Jamba from checkpoints made here: layers of two kinds, without and with experts."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import EXPERTS, FF, HEADS, KV_HEADS, VOCAB, D, convert, write
from .family_checks import (
    check_missing,
    check_tensors,
    dense_rows,
    expert_stacks,
    keys_of,
    shapes_of,
)

CLASS, STATE, RANK, INNER = "JambaForCausalLM", 10, 2, 2 * D
KV = D // HEADS * KV_HEADS
CONFIG = {
    "num_hidden_layers": 2,
    "head_dim": None,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": STATE,
    "rope_theta": None,
}
MIXER = {
    "in_proj.weight": ((2 * INNER, D), "ssm_in.weight"),
    "conv1d.weight": ((INNER, 1, 4), "ssm_conv1d.weight"),
    "conv1d.bias": ((INNER,), "ssm_conv1d.bias"),
    "x_proj.weight": ((RANK + 2 * STATE, INNER), "ssm_x.weight"),
    "dt_proj.weight": ((INNER, RANK), "ssm_dt.weight"),
    "dt_proj.bias": ((INNER,), "ssm_dt.bias"),
    "A_log": ((INNER, STATE), "ssm_a"),
    "D": ((INNER,), "ssm_d"),
    "out_proj.weight": ((D, INNER), "ssm_out.weight"),
    "dt_layernorm.weight": ((RANK,), "ssm_dt_norm.weight"),
    "b_layernorm.weight": ((STATE,), "ssm_b_norm.weight"),
    "c_layernorm.weight": ((STATE,), "ssm_c_norm.weight"),
}
FIRST = {f"mamba.{name}": found for name, found in MIXER.items()}
FIRST |= dense_rows(D, FF, "feed_forward.")
SECOND = {
    "self_attn.q_proj.weight": ((D, D), "attn_q.weight"),
    "self_attn.k_proj.weight": ((KV, D), "attn_k.weight"),
    "self_attn.v_proj.weight": ((KV, D), "attn_v.weight"),
    "self_attn.o_proj.weight": ((D, D), "attn_output.weight"),
}
ROUTER = {"feed_forward.router.weight": ((EXPERTS, D), "ffn_gate_inp.weight")}


def names_of(*layers: dict) -> dict:
    """Return {stored name: (shape, GGUF name)}, also of what all layers have."""
    names = {
        "model.embed_tokens.weight": ((VOCAB, D), "token_embd.weight"),
        "model.final_layernorm.weight": ((D,), "output_norm.weight"),
    }
    both = {
        "input_layernorm.weight": ((D,), "attn_norm.weight"),
        "pre_ff_layernorm.weight": ((D,), "ffn_norm.weight"),
    }
    for layer, own in enumerate(layers):
        for name, (shape, gguf) in (both | own).items():
            names[f"model.layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return names


NAMES = names_of(FIRST, SECOND | ROUTER)
PARTS = {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}
EXPERT = "model.layers.{layer}.feed_forward.experts.{expert}.{part}_proj.weight"
STACKS = expert_stacks(EXPERT, PARTS, [1])
SHAPES = shapes_of(NAMES, STACKS)


def moved(name: str, values: np.ndarray) -> np.ndarray:
    if name.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    return values[:, 0] if name.endswith("conv1d.weight") else values


def test_names_values_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, NAMES, STACKS, moved=moved)
    assert keys_of(metadata, "jamba") == {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": D,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": [0, KV_HEADS],
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "ssm.conv_kernel": 4,
        "ssm.inner_size": INNER,
        "ssm.state_size": STATE,
        "ssm.time_step_rank": RANK,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
    }


def test_one_expert_is_a_dense_layer(tmp_path):
    names = names_of(FIRST, SECOND | dense_rows(D, FF, "feed_forward."))
    stored = write(tmp_path, CLASS, CONFIG | {"num_experts": 1}, shapes_of(names))
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, moved=moved)
    assert metadata["jamba.expert_count"] == metadata["jamba.expert_used_count"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(tmp_path, name):
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_layer_offset": 2}, "'attn_layer_offset' is 2"),
        ({"expert_layer_offset": 3}, "'expert_layer_offset' is 3"),
        ({"num_experts_per_tok": 4}, "'num_experts_per_tok' is 4"),
        ({"mamba_expand": 3}, "layers have 96 channels"),
        ({"mamba_proj_bias": True}, "'mamba_proj_bias' is true"),
        ({"mamba_conv_bias": False}, "'mamba_conv_bias' is false"),
        ({"head_dim": 16}, "4 heads of 16 elements are not hidden_size 32"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ],
)
def test_what_has_no_key_is_refused(tmp_path, change, message):
    write(tmp_path, CLASS, CONFIG | change, SHAPES)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path)

"""ERNIE 4.5 with experts: what becomes of dense layers, experts, the bias of their choice, and
blocks that predict further tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from iqforge.errors import CheckpointError

from .family_checkpoint import EMBEDDING, EXPERTS, FF, HEAD, KV, D, Names, Q, convert, write
from .family_checks import Stacks, check_missing, check_tensors, expert_stacks, shapes_of

WIDTH = 24  # of an expert
CONFIG = {
    "num_hidden_layers": 4,
    "head_dim": None,
    "hidden_size": D,
    "rope_theta": None,
    "moe_num_experts": EXPERTS,
    "moe_k": 2,
    "moe_intermediate_size": WIDTH,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 3,
}
BIAS = "mlp.moe_statics.e_score_correction_bias"
# Without `head_dim`, heads have D / 4 elements.
SMALLER = HEAD * 4 // D
COMMON = {
    "input_layernorm.weight": ((D,), "attn_norm.weight"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
    "self_attn.q_proj.weight": ((Q // SMALLER, D), "attn_q.weight"),
    "self_attn.k_proj.weight": ((KV // SMALLER, D), "attn_k.weight"),
    "self_attn.v_proj.weight": ((KV // SMALLER, D), "attn_v.weight"),
    "self_attn.o_proj.weight": ((D, Q // SMALLER), "attn_output.weight"),
}
DENSE = {
    "mlp.gate_proj.weight": ((FF, D), "ffn_gate.weight"),
    "mlp.up_proj.weight": ((FF, D), "ffn_up.weight"),
    "mlp.down_proj.weight": ((D, FF), "ffn_down.weight"),
}
SPARSE = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    BIAS: ((1, EXPERTS), "exp_probs_b.bias"),
    "mlp.shared_experts.gate_proj.weight": ((2 * WIDTH, D), "ffn_gate_shexp.weight"),
    "mlp.shared_experts.up_proj.weight": ((2 * WIDTH, D), "ffn_up_shexp.weight"),
    "mlp.shared_experts.down_proj.weight": ((D, 2 * WIDTH), "ffn_down_shexp.weight"),
}
PARTS = {"gate": (WIDTH, D), "up": (WIDTH, D), "down": (D, WIDTH)}


def names_of(sparse: set[int]) -> Names:
    """Return {stored name: (shape, GGUF name)} without experts."""
    names = {name: (shape, f"{gguf}.weight") for name, (shape, gguf) in EMBEDDING.items()}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, (shape, gguf) in (COMMON | (SPARSE if layer in sparse else DENSE)).items():
            names[f"model.layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return names


def stacks_of(sparse: set[int]) -> Stacks:
    stored = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    return expert_stacks(stored, PARTS, sparse)


SHAPES = shapes_of(names_of({1, 2, 3}), stacks_of({1, 2, 3}))


@pytest.mark.parametrize(
    "change, sparse",
    [
        ({}, {1, 2, 3}),
        ({"moe_layer_interval": 2}, {1, 3}),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 2}, {3}),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1}, {0, 1, 2, 3}),
    ],
)
def test_names_values_and_keys(tmp_path: Path, change: dict, sparse: set[int]):
    names, stacks = names_of(sparse), stacks_of(sparse)
    mtp = {"model.mtp_emb_norm.0.weight": (D,), "model.mtp_block.0.input_layernorm.weight": (D,)}
    shapes = shapes_of(names, stacks) | mtp
    stored = write(tmp_path, "Ernie4_5_MoeForCausalLM", CONFIG | change, shapes)
    made, metadata = convert(tmp_path)
    check_tensors(made, stored, names, stacks, lambda name, x: x[0] if name.endswith(BIAS) else x)
    keys = {
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "interleave_moe_layer_step": change.get("moe_layer_interval", 1),
        "leading_dense_block_count": change.get("moe_layer_start_index", 1),
        "expert_feed_forward_length": WIDTH,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 2 * WIDTH,
        "rope.freq_base": 5e5,
    }
    prefix = "ernie4_5-moe."
    assert {key: metadata[prefix + key] for key in keys} == keys
    assert f"{prefix}attention.key_length" not in metadata


@pytest.mark.parametrize("name", ["mlp.gate.weight", BIAS, "mlp.shared_experts.up_proj.weight"])
def test_what_a_layer_lacks_is_named(tmp_path: Path, name: str):
    name = f"model.layers.2.{name}"
    check_missing(tmp_path, "Ernie4_5_MoeForCausalLM", CONFIG, SHAPES, name)


def test_a_bias_of_another_shape_is_refused(tmp_path: Path):
    shapes = SHAPES | {f"model.layers.2.{BIAS}": (2, EXPERTS)}
    write(tmp_path, "Ernie4_5_MoeForCausalLM", CONFIG, shapes)
    with pytest.raises(CheckpointError, match=r"has shape \[2, 3\]"):
        convert(tmp_path)


def test_without_shared_experts(tmp_path: Path):
    shapes = {name: shape for name, shape in SHAPES.items() if "shared" not in name}
    config = CONFIG | {"moe_num_shared_experts": 0}
    write(tmp_path, "Ernie4_5_MoeForCausalLM", config, shapes)
    made, metadata = convert(tmp_path)
    assert not any("shexp" in name for name in made)
    assert metadata["ernie4_5-moe.expert_shared_count"] == 0
    assert "ernie4_5-moe.expert_shared_feed_forward_length" not in metadata

"""Ling 3.0 from checkpoints made here, as it is published and as transformers saves it."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.errors import ConfigError

from .family_checkpoint import FF, HEADS, VOCAB, D, convert, write
from .family_checks import (
    check_missing,
    dense_rows,
    expert_stacks,
    further_rows,
    keys_of,
    shapes_of,
)

CLASS = "BailingMoeV3ForCausalLM"
SIZE, RANK, Q_RANK, NOPE, ROT, VALUE, EXPERTS, EXPERT = 8, 24, 20, 12, 4, 16, 4, 20
INNER, QUERY, LAYERS = HEADS * SIZE, HEADS * (NOPE + ROT), 2
CONFIG = {
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "head_dim": SIZE,
    "num_key_value_heads": HEADS,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": RANK,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROT,
    "v_head_dim": VALUE,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_interleave": True,
    "moe_intermediate_size": EXPERT,
    "moe_shared_expert_intermediate_size": EXPERT,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 6000000,
}
# As transformers 5 saves it: other words, the kind of each layer, and a head size of no delta net.
_SAVED_AS = {
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_nextn_predict_layers": None,
    "score_function": None,
    "moe_shared_expert_intermediate_size": None,
    "no_kda_lora": None,
}
SAVED = {
    new: value for old, value in CONFIG.items() if (new := _SAVED_AS.get(old, old)) is not None
} | {
    "head_dim": ROT,
    "linear_head_dim": SIZE,
    "linear_num_heads": HEADS,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
NORMS = {
    "input_layernorm.weight": ((D,), "attn_norm.weight"),
    "post_attention_layernorm.weight": ((D,), "ffn_norm.weight"),
}
LINEAR = {
    **{f"attention.{x}_proj.weight": ((INNER, D), f"attn_{x}.weight") for x in "qkv"},
    **{f"attention.{x}_conv1d.weight": ((INNER, 1, 4), f"ssm_conv1d_{x}.weight") for x in "qkv"},
    **{f"attention.{x}_proj.weight": ((INNER, D), f"ssm_{x}_a.weight") for x in "fg"},
    "attention.b_proj.weight": ((HEADS, D), "ssm_beta.weight"),
    "attention.A_log": ((HEADS,), "ssm_a"),
    "attention.dt_bias": ((INNER,), "ssm_dt.bias"),
    "attention.o_norm.weight": ((SIZE,), "ssm_norm.weight"),
    "attention.o_proj.weight": ((D, INNER), "attn_output.weight"),
}
KV_B = "attention.kv_b_proj.weight"
LATENT = {
    "attention.q_proj.weight": ((QUERY, D), "attn_q.weight"),
    "attention.kv_a_proj_with_mqa.weight": ((RANK + ROT, D), "attn_kv_a_mqa.weight"),
    "attention.kv_a_layernorm.weight": ((RANK,), "attn_kv_a_norm.weight"),
    KV_B: ((HEADS * (NOPE + VALUE), RANK), ""),
    "attention.g_proj.weight": ((HEADS, D), "attn_gate.weight"),
    "attention.dense.weight": ((D, HEADS * VALUE), "attn_output.weight"),
}
DENSE = dense_rows(D, FF)
SPARSE = {
    "mlp.gate.weight": ((EXPERTS, D), "ffn_gate_inp.weight"),
    "mlp.gate.expert_bias": ((EXPERTS,), "exp_probs_b.bias"),
    **dense_rows(D, EXPERT, "mlp.shared_experts.", "_shexp"),
}
FURTHER = further_rows(D, "final_layernorm", "layer_output_norm")


def table(further: bool = True) -> dict:
    """Return stored name -> shape, GGUF name, of what is not in a stack."""
    found: dict = {
        "model.word_embeddings.weight": ((VOCAB, D), "token_embd.weight"),
        "model.norm.weight": ((D,), "output_norm.weight"),
        "lm_head.weight": ((VOCAB, D), "output.weight"),
    }
    of_layers = [NORMS | LINEAR | DENSE, NORMS | LATENT | SPARSE]
    if further:
        of_layers.append(NORMS | LATENT | SPARSE | FURTHER)
    for layer, rows in enumerate(of_layers):
        for name, (shape, gguf) in rows.items():
            found[f"model.layers.{layer}.{name}"] = shape, f"blk.{layer}.{gguf}"
    return found


def stacks(further: bool = True) -> dict:
    return expert_stacks(
        "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight",
        {"gate": (EXPERT, D), "up": (EXPERT, D), "down": (D, EXPERT)},
        (1, 2) if further else (1,),
        n_experts=EXPERTS,
    )


SHAPES = shapes_of(table(), stacks())


def check(made: dict, stored: dict, rows: dict, of_experts: dict) -> None:
    wanted = {}
    for name, (_, gguf) in rows.items():
        values = stored[name]
        if name.endswith("A_log"):
            values = np.exp(values.astype(np.float64)).astype(np.float32)
        if name.endswith("conv1d.weight"):
            assert made[gguf].shape == (1, INNER, 1, 4)
        if name.endswith(KV_B):
            k, v = np.split(values.reshape(HEADS, NOPE + VALUE, RANK), [NOPE], axis=1)
            wanted[f"{gguf}attn_k_b.weight"] = k.swapaxes(1, 2)
            wanted[f"{gguf}attn_v_b.weight"] = v
        else:
            wanted[gguf] = values
    for gguf, experts in of_experts.items():
        wanted[gguf] = np.stack([stored[name] for name in experts])
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(made[name].ravel(), values.ravel()), name
    assert made["blk.0.ssm_a"].shape == (HEADS, 1)


KEYS = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": D,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": [0, 1, 1],
    "attention.key_length": RANK + ROT,
    "attention.value_length": SIZE,
    "attention.key_length_mla": NOPE + ROT,
    "attention.value_length_mla": VALUE,
    "attention.kv_lora_rank": RANK,
    "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
    "rope.freq_base": 6e6,
    "rope.dimension_count": ROT,
    "ssm.conv_kernel": 4,
    "kda.head_dim": SIZE,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "leading_dense_block_count": 1,
    "vocab_size": VOCAB,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "expert_gating_func": 2,
    "expert_feed_forward_length": EXPERT,
    "expert_shared_feed_forward_length": EXPERT,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "nextn_predict_layers": 1,
}


def test_tensors_and_keys(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path)
    check(made, stored, table(), stacks())
    assert keys_of(metadata, "bailingmoe3") == KEYS


def test_without_further_blocks(tmp_path):
    stored = write(tmp_path, CLASS, CONFIG, SHAPES)
    made, metadata = convert(tmp_path, mtp="drop")
    check(made, stored, table(False), stacks(False))
    keys = keys_of(metadata, "bailingmoe3")
    assert keys == {k: v for k, v in KEYS.items() if k != "nextn_predict_layers"} | {
        "block_count": 2,
        "attention.head_count_kv": [0, 1],
    }


def test_what_transformers_saves(tmp_path):
    """It calls the last matrix of delta nets as that of latent attention."""
    rows, of_experts = table(False), stacks(False)
    renamed = {
        name.replace("attention.o_proj", "attention.dense"): row for name, row in rows.items()
    }
    stored = write(tmp_path, "BailingHybridForCausalLM", SAVED, shapes_of(renamed, of_experts))
    made, metadata = convert(tmp_path)
    check(made, stored, renamed, of_experts)
    keys = keys_of(metadata, "bailingmoe3")
    assert keys["kda.head_dim"] == SIZE and keys["attention.head_count_kv"] == [0, 1]
    assert keys["expert_group_count"] == 2 and keys["expert_used_count"] == 2
    assert keys["expert_weights_norm"] is True


def test_queries_of_latent_vectors(tmp_path):
    """As in Ling-3.0-tiny."""
    rows = table(False)
    del rows["model.layers.1.attention.q_proj.weight"]
    for name, shape, gguf in (
        ("q_a_proj", (Q_RANK, D), "attn_q_a"),
        ("q_a_layernorm", (Q_RANK,), "attn_q_a_norm"),
        ("q_b_proj", (QUERY, Q_RANK), "attn_q_b"),
    ):
        rows[f"model.layers.1.attention.{name}.weight"] = shape, f"blk.1.{gguf}.weight"
    config = CONFIG | {"q_lora_rank": Q_RANK, "num_nextn_predict_layers": 0}
    stored = write(tmp_path, CLASS, config, shapes_of(rows, stacks(False)))
    made, metadata = convert(tmp_path)
    check(made, stored, rows, stacks(False))
    assert metadata["bailingmoe3.attention.q_lora_rank"] == Q_RANK


@pytest.mark.parametrize(
    "limits, expected",
    [([None, 7], [0, 7, 0]), ([0, 4.5, 5, None], [0, 4.5, 5]), ([], [0, 0, 0])],
)
def test_limits_of_layers(tmp_path, limits, expected):
    lists = {"expert_swiglu_limit_list": limits, "share_expert_swiglu_limit_list": [1, 2, 3]}
    write(tmp_path, CLASS, CONFIG | lists, SHAPES)
    keys = keys_of(convert(tmp_path)[1], "bailingmoe3")
    assert keys["swiglu_clamp_exp"] == expected and keys["swiglu_clamp_shexp"] == [1, 2, 3]


@pytest.mark.parametrize("name", [name for name in SHAPES if ".experts." not in name])
def test_a_missing_tensor_is_named(tmp_path, name):
    words = name.replace("attention.dense", "attention.(dense|o_proj)")
    check_missing(tmp_path, CLASS, CONFIG, SHAPES, name, f"'{words}': is missing")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
        ({"kda_safe_gate": False}, "'kda_safe_gate' is false"),
        ({"no_kda_lora": False}, "'no_kda_lora' is false"),
        ({"use_mla_nope": True}, "'use_mla_nope' is true"),
        ({"use_qkv_bias": True}, "'use_qkv_bias' is true"),
        ({"rope_interleave": False}, "'rope_interleave' is false"),
        ({"moe_router_enable_expert_bias": False}, "'moe_router_enable_expert_bias' is false"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "implies head_wise"),
        ({"score_function": "softmax"}, "'scoring_func' is 'softmax'"),
        ({"kda_lower_bound": 0}, "'kda_lower_bound' is 0, expected a number below 0"),
        ({"moe_shared_expert_intermediate_size": 24}, "imply 20"),
        ({"num_hidden_layers": 3}, "3 is not a multiple of layer_group_size 2"),
        ({"num_hidden_layers": 1 << 30}, "'num_hidden_layers' is 1073741824"),
        ({"layer_types": ["full_attention"]}, "'layer_types' has 1 items"),
        ({"expert_swiglu_limit_list": [1, "x"]}, "'expert_swiglu_limit_list' is not a list"),
        ({"share_expert_swiglu_limit_list": [-1]}, "'share_expert_swiglu_limit_list' is not"),
        ({"expert_swiglu_limit_list": [10**400]}, "numbers from 0 to 3.40282e\\+38"),
        ({"expert_swiglu_limit_list": [True]}, "'expert_swiglu_limit_list' is not a list"),
        ({"expert_swiglu_limit_list": [1.0] * 99}, "has limits of 99 layers"),
        ({"n_group": 4, "num_expert_group": 2}, "'num_expert_group' and 'n_group' are 2 and 4"),
        ({"linear_num_heads": 3}, "linear attention have 3 heads, and others 4"),
        ({"hidden_act": "gelu"}, "GGUF's bailingmoe3 implies silu"),
    ],
)
def test_refused(tmp_path, change, words):
    write(tmp_path, CLASS, CONFIG | change, {})
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path, vocab_only=True)

"""Further settings of the random models of all architectures, besides those of `tiny_cases.py`."""

from __future__ import annotations

from typing import Any

from .tiny_cases_deepseek import GROUPS
from .tiny_cases_minicpm import both_factors
from .tiny_cases_stablelm import OF_12B
from .tiny_configs import ORIGINAL, WINDOW, yarn

YARN = {"rope_parameters": yarn()}
YARN_OF_LATENT = {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
BOTH_FACTORS = both_factors(6, original=256) | {"rope_theta": 5000.0}
PARTIAL = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
}
# Case -> further settings of its config that GGUF can express. What it cannot is in
# test_convert_implied.py.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({"attention_bias": True}, {"mlp_bias": True}, YARN, LINEAR),
    "mistral": (YARN,),
    "ministral3": (
        {
            "rope_parameters": yarn(
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
                beta_fast=8.0,
                beta_slow=2.0,
            )
        },
    ),
    "qwen2": (YARN, {"tie_word_embeddings": True}),
    "qwen2_moe": ({"qkv_bias": False}, YARN),
    "qwen3": ({"attention_bias": True}, YARN),
    "qwen3_moe": ({"attention_bias": True}, YARN),
    "qwen3_next": (
        {"attention_bias": True},
        PARTIAL,
        {"linear_conv_kernel_dim": 3},
        {"linear_value_head_dim": 24},
    ),
    "qwen3_5": ({"attention_bias": True}, {"linear_num_value_heads": 2}),
    "qwen3_5_moe": ({"attention_bias": True}, {"linear_value_head_dim": 24}),
    "deepseek_v2_lite": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"first_k_dense_replace": 0},
        {"routed_scaling_factor": 3.0},
        YARN,
    ),
    "deepseek_v3": (
        {"norm_topk_prob": False},
        {"q_lora_rank": None},
        {"routed_scaling_factor": 1.0},
        {"tie_word_embeddings": True},
        YARN,
    ),
    "glm4_moe_lite": (
        {"mlp_layer_types": ["sparse"] * 3},
        {"q_lora_rank": None},
        YARN_OF_LATENT,
    ),
    "glm4_moe": (
        {"norm_topk_prob": False},
        {"attention_bias": False},
        {"n_group": 2, "topk_group": 1},
        {"tie_word_embeddings": True},
        {"rope_parameters": yarn(partial_rotary_factor=0.5)},
    ),
    "bailing_moe_v2": (
        {"partial_rotary_factor": 1.0},
        {"norm_topk_prob": False},
        {"num_shared_experts": 2},
        {"n_group": 1, "topk_group": 1},
    ),
    "dots1": (
        {"norm_topk_prob": False},
        {"first_k_dense_replace": 0},
        {"n_group": 2, "topk_group": 1},
        {"n_shared_experts": 1},
        YARN,
    ),
    "exaone4": (
        {"sliding_window": None, "layer_types": ["full_attention"] * 5},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "afmoe": (
        {"num_shared_experts": 1, "tie_word_embeddings": True},
        {"num_dense_layers": 0, "num_key_value_heads": 4},
        YARN,
    ),
    "mimo2": (
        {"routed_scaling_factor": 1.5, "attention_value_scale": None},
        {"num_key_value_heads": 2, "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
    ),
    "minicpm": (
        {"attention_bias": True, "tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        LINEAR,
    ),
    "nemotron": (
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 24, "num_key_value_heads": 1},
        {"rope_parameters": LINEAR["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    ),
    "phimoe": (
        {"attention_bias": False, "lm_head_bias": True},
        {"tie_word_embeddings": True, "sliding_window": WINDOW},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "stablelm": (
        {"use_qkv_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
        {"rope_parameters": PARTIAL["rope_parameters"] | {"rope_theta": 500.0}},
        OF_12B | {"num_key_value_heads": 4},
        {"qk_layernorm": True},
        {"use_parallel_residual": True},
    ),
    "minicpm3": ({"tie_word_embeddings": False, "rope_parameters": BOTH_FACTORS},),
    "deepseek_moe": (
        {"first_k_dense_replace": 0, "num_key_value_heads": 1},
        {"first_k_dense_replace": 2, "n_shared_experts": 1},
    ),
    "internlm2": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "num_key_value_heads": 1},
    ),
    "apertus": (
        {"attention_bias": True},
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        YARN,
    ),
    "exaone_moe": (
        {"n_group": 1, "first_k_dense_replace": 2, "num_shared_experts": 1},
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "hy_v3": (
        {"mlp_layer_types": ["dense", "dense", "sparse"], "num_shared_experts": 1},
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts_per_tok": 3},
        YARN,
        LINEAR,
    ),
    "step35": (
        {"rope_scaling": None, "rope_theta": 10000.0},
        {"use_head_wise_attn_gate": False, "use_moe_router_bias": False},
    ),
    "llama4": (
        {"rope_parameters": LLAMA3},
        {"tie_word_embeddings": True, "interleave_moe_layer_step": 1},
        {"num_experts_per_tok": 2},
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},  # as Scout: nothing is between
    ),
    "hunyuan_dense": (
        {"tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        YARN,
        LINEAR,
    ),
    "hunyuan_moe": ({"tie_word_embeddings": False}, {"moe_topk": 3}, YARN),
    "minimax_m2": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rotary_dim": 6},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        YARN,
    ),
    "olmoe": ({"num_key_value_heads": 2}, {"tie_word_embeddings": True}, YARN),
    "olmo2": ({"num_key_value_heads": None}, {"tie_word_embeddings": True}, YARN, LINEAR),
    "olmo3": (
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
        {
            "rope_parameters": {
                "full_attention": yarn(attention_factor=1.5),
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {"rope_parameters": None},
    ),
    "arcee": ({"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},),
    "glm4": (
        {"attention_bias": False, "tie_word_embeddings": True},
        {"rope_parameters": yarn(partial_rotary_factor=0.5)},
    ),
    "lfm2": (
        {"conv_L_cache": 4, "tie_word_embeddings": False},
        {"layer_types": None, "full_attn_idxs": [0], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": ({"num_dense_layers": 0}, YARN),
    "glm_moe_dsa": (
        {"indexer_types": None},
        {"norm_topk_prob": False},
        YARN_OF_LATENT,
        GROUPS,
    ),
    "gemma": ({"attention_bias": True}, {"num_key_value_heads": 1}, YARN),
    "gemma2": ({"attention_bias": True}, YARN),
    "gemma3": (
        {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]},
        {"final_logit_softcapping": 3.0},
        {"attention_bias": True},
    ),
    "gemma3n": (
        {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5] * 7},
        {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 7},
        {"intermediate_size": [56, 64, 40, 48, 56, 72, 80], "attention_bias": True},
        {"vocab_size_per_layer_input": 300},
    ),
    "gemma4_moe": ({"attention_k_eq_v": False}, {"final_logit_softcapping": None}),
    "gemma4_e": (
        {"use_double_wide_mlp": False},
        {"num_kv_shared_layers": 0},
        {"num_kv_shared_layers": 2},
    ),
    "gpt_oss": ({"attention_bias": False}, {"tie_word_embeddings": True}),
    "cohere": (
        {"use_qk_norm": True},
        {"num_key_value_heads": 4, "use_qk_norm": True},
        {"logit_scale": 1.0},
    ),
    "cohere2": (
        {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
        {"sliding_window": 300},
    ),
    "cohere2_moe": (
        {"num_shared_experts": 1, "norm_topk_prob": True},
        {"expert_selection_fn": "softmax", "first_k_dense_replace": 2},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"rms_norm_eps": None, "layer_types": ["full_attention", "sliding_attention"] * 3},
    ),
    "command_a_plus": (
        {"expert_selection_fn": "softmax", "norm_topk_prob": False, "num_shared_experts": 1},
        {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": None},
    ),
    "granite": (
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": False},
        {"head_dim": 20},
        YARN,
    ),
    "falcon_h1": (
        {"mamba_rms_norm": True},
        {"mamba_conv_bias": False, "mamba_n_groups": 1},
        {"mamba_d_ssm": None},
        {"tie_word_embeddings": True, "lm_head_multiplier": 1.5},
        YARN,
    ),
    "mamba": ({"tie_word_embeddings": False, "conv_kernel": 3, "time_step_rank": "auto"},),
    "jamba": (
        {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_offset": 0},
        {"expert_layer_period": 3, "expert_layer_offset": 0, "mamba_dt_rank": "auto"},
    ),
    "mamba2": (
        {"tie_word_embeddings": True},
        {"n_groups": 1, "use_conv_bias": False},
        {"conv_kernel": 3, "expand": 3, "num_heads": 9, "n_groups": 3},
    ),
    "kimi_linear": (
        {"q_lora_rank": 36},
        {"num_hidden_layers": 3, "first_k_dense_replace": 0, "layer_types": None}
        | {
            "linear_attn_config": {
                "full_attn_layers": [1],
                "kda_layers": [2, 3],
                "head_dim": 24,
                "num_heads": 4,
                "short_conv_kernel_size": 3,
            }
        },
    ),
    "bailing_hybrid": (
        {"n_group": 1, "topk_group": 1, "kda_lower_bound": -0.5},
        {"num_hidden_layers": 3, "first_k_dense_replace": 0, "short_conv_kernel_size": 3}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_local_experts": 6, "n_group": 3, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "solar_open": (
        {"norm_topk_prob": False, "tie_word_embeddings": True},
        {"n_group": 2, "topk_group": 1, "attention_bias": True, "routed_scaling_factor": 1.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "n_shared_experts": 2},
    ),
    "deepseek_v4": (
        {"mlp_layer_types": ["moe"] * 5, "hc_mult": 4, "hc_sinkhorn_iters": 1},
        {"mlp_layer_types": ["hash_moe"] * 5, "index_topk": 64, "swiglu_limit": 10.0},
        {"rope_parameters": None, "sliding_window": 64},
    ),
    "granite_moe_shared": ({"attention_bias": True},),
    "granite_swa": (
        {"attention_bias": True, "mlp_bias": True, "layer_rope_theta": None},
        {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 5},
    ),
    "granite_moe_swa": ({"shared_intermediate_size": 0, "layer_rope_theta": [1e4, 0, 1e4]},),
    "laguna": (
        {"gating": "per-element", "moe_routed_scaling_factor": 1.0},
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3, "tie_word_embeddings": True},
        {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    ),
    "mellum": (
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"rope_parameters": None, "tie_word_embeddings": True},
    ),
    "laguna_m": (
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": ORIGINAL,
                    "attention_factor": 1.15,
                }
            },
        },
        {"rope_parameters": None},
    ),
    "granite4": (
        {"position_embedding_type": None},
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 28},
    ),
    "phi3": (PARTIAL, {"sliding_window": WINDOW}, {"tie_word_embeddings": True}),
    "ernie4_5": ({"tie_word_embeddings": False}, YARN, LINEAR),
    "ernie4_5_moe": (
        {"tie_word_embeddings": False},
        {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": 0},
        {"moe_layer_interval": 2},
        YARN,
    ),
    "seed_oss": ({"attention_bias": False}, {"tie_word_embeddings": True}, YARN),
    "smollm3": ({"tie_word_embeddings": False}, {"head_dim": 24}, YARN),
    "starcoder2": ({"use_bias": False}, {"tie_word_embeddings": True}),
}

"""Cases of DeepSeek V2 and V3, and of their architecture: Kimi K2 and K2.5, GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WIDE, Case, Sizes, latent, yarn

GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}


MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}


def _deepseek_v2_lite(s: Sizes) -> dict[str, Any]:
    return latent(
        s,
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_parameters=yarn(**MSCALE),
    )


def _deepseek_v2(s: Sizes) -> dict[str, Any]:
    return latent(
        s, topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=4.0
    ) | {**GROUPS, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}


def _deepseek_v3(s: Sizes) -> dict[str, Any]:
    rope = yarn(mscale=1.0, mscale_all_dim=1.0)
    return latent(s, num_mtp_layers=0, rope_parameters=rope) | GROUPS


def _kimi_k2(s: Sizes) -> dict[str, Any]:
    """One group."""
    rope = yarn(mscale=1.0, mscale_all_dim=1.0)
    return latent(s, num_mtp_layers=0, routed_scaling_factor=2.827, rope_parameters=rope)


def _kimi_k25(s: Sizes) -> dict[str, Any]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    return {
        # Wide enough for every type in `attn_k_b`, whose rows are the unrotated part of a head.
        "text_config": _kimi_k2(s)
        | {"model_type": "deepseek_v3", "qk_nope_head_dim": 256 if s is WIDE else s.nope},
        "vision_config": vision,
        "projection_hidden_size": 16,
        "image_token_id": 310,  # not among the tokens of the text
        "tie_word_embeddings": False,
    }


def _glm4_moe_lite(s: Sizes) -> dict[str, Any]:
    config = latent(s, routed_scaling_factor=1.8, rms_norm_eps=1e-5)
    del config["first_k_dense_replace"]
    return config


CASES = [
    Case("deepseek_v2_lite", "DeepseekV2ForCausalLM", "deepseek2", _deepseek_v2_lite),
    Case("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek2", _deepseek_v2),
    Case("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek2", _deepseek_v3),
    Case("kimi_k2", "DeepseekV3ForCausalLM", "deepseek2", _kimi_k2),
    Case(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        "deepseek2",
        _kimi_k25,
        # transformers saves the text model's layers under the name of the vision model's
        renamed=("language_model.model.blocks.", "language_model.model.layers."),
    ),
    Case("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "deepseek2", _glm4_moe_lite),
]

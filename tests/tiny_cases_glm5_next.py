"""The case of GLM-5.3-Flash, with a small vision model that texts do not need."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, SMALL, Case, Sizes, common


def _glm5_next(s: Sizes) -> dict[str, Any]:
    """Four residual streams, delta nets with bounded decays, and latent attention without rotation
    to pools of positions that an indexer chooses in every second layer.
    """
    text = common(s, num_key_value_heads=HEADS, num_hidden_layers=4) | {
        "q_lora_rank": s.q_rank,
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": 0,
        "v_head_dim": s.value,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full"] * 4,
        "linear_head_dim": 16 if s is SMALL else 128,
        "linear_num_heads": HEADS,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "index_topk": 12,
        "index_kpool": 4,
        "index_head_dim": s.index_head,
        # With few heads, scores of several positions are 0, and nothing says which is chosen.
        "index_n_heads": 16,
        "swiglu_limit": 0.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 5,
    }
    del text["rope_parameters"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": s.d,
        "projection_intermediate_size": 16,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 310,  # not among the tokens of the text
        "video_token_id": 311,
        "image_start_token_id": 312,
        "image_end_token_id": 313,
        "video_start_token_id": 314,
        "video_end_token_id": 315,
    }


def _glm5_next_shared(s: Sizes) -> dict[str, Any]:
    """A layer that sees what the one before it chose, and experts in every layer."""
    config = _glm5_next(s)
    config["text_config"] |= {
        "mlp_layer_types": ["sparse"] * 4,
        "layer_types": [*["indexed_attention"] * 2, "linear_attention", "indexed_attention"],
        "indexer_types": ["full", "shared", "shared", "full"],
        "index_kpool": 3,
        "index_topk": 9,
        "hc_sinkhorn_iters": 1,
        "norm_topk_prob": False,
        "swiglu_limit": 10.0,
    }
    return config


_CLASS = "Glm5NextForConditionalGeneration"
CASES = [
    Case("glm5_next", _CLASS, "glm5-next", _glm5_next),
    Case("glm5_next_shared", _CLASS, "glm5-next", _glm5_next_shared),
]

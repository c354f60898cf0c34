"""Cases of MiniCPM and MiniCPM3, with two sets of rotary factors as published ones have."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, Case, Sizes, common, headless

CONTEXT = 512


def both_factors(pairs: int, original: int = CONTEXT) -> dict[str, Any]:
    """Factors of so many pairs; the long ones are for texts of more than `original` tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.4 * pair for pair in range(pairs)],
    }


def _minicpm(s: Sizes) -> dict[str, Any]:
    config = headless(s, tie_word_embeddings=True, scale_emb=3.0, scale_depth=1.4)
    head = s.d // config["num_attention_heads"]
    return config | {"dim_model_base": s.d // 2, "rope_parameters": both_factors(head // 2)}


def _minicpm3(s: Sizes) -> dict[str, Any]:
    return common(s, num_key_value_heads=HEADS, tie_word_embeddings=True) | {
        "q_lora_rank": s.q_rank,
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rotated,
        "v_head_dim": s.value,
        # The norms of latent vectors have this one whatever the config says.
        "rms_norm_eps": 1e-6,
        "rope_parameters": both_factors(s.rotated // 2),
    }


CASES = [
    Case("minicpm", "MiniCPMForCausalLM", "minicpm", _minicpm),
    Case("minicpm3", "MiniCPM3ForCausalLM", "minicpm3", _minicpm3),
]

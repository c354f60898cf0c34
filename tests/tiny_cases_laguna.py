"""Cases of Laguna."""

from __future__ import annotations

from typing import Any

from .tiny_configs import KV_HEADS, ORIGINAL, SMALL, WINDOW, Case, Sizes, experts, headed


def _laguna(s: Sizes) -> dict[str, Any]:
    """As XS.2: gates of heads, of which layers with a window have more. The first layer is dense.
    In the wide size gates have as many rows as types take together.
    """
    near = (False, True, True, True, False) if s is SMALL else (False, True)
    heads, kv_heads = ((4, 6), KV_HEADS) if s is SMALL else ((16, 32), 4)
    rotations = {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,  # what YaRN has for the factor, as published
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    more = {
        "head_dim": s.head if s is SMALL else 64,
        "num_hidden_layers": len(near),
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": [heads[x] for x in near],
        "num_key_value_heads": kv_heads,
        "gating": "per-head",
        "layer_types": ["sliding_attention" if x else "full_attention" for x in near],
        "sliding_window": WINDOW,
        "shared_expert_intermediate_size": s.per_layer if s is SMALL else s.ff_expert,
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": rotations,
    }
    return headed(s) | experts(s) | more


def _laguna_m(s: Sizes) -> dict[str, Any]:
    """As M.1: gates of elements, and no window."""
    config = _laguna(s) | {"num_hidden_layers": 2, "gating": "per-element"}
    dropped = ("layer_types", "num_attention_heads_per_layer", "sliding_window")
    config = {key: value for key, value in config.items() if key not in dropped}
    return config | {"mlp_layer_types": ["dense", "sparse"]}


CASES = [
    Case("laguna", "LagunaForCausalLM", "laguna", _laguna),
    Case("laguna_m", "LagunaForCausalLM", "laguna", _laguna_m),
]

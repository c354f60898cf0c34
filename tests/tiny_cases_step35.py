"""Cases of Step-3.5-Flash."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, KV_HEADS, ORIGINAL, SMALL, WINDOW, Case, Sizes, headed


def _step35(s: Sizes) -> dict[str, Any]:
    """Layers with a window have more heads. The last ones limit what the shared expert joins, and
    the last what all do. In the wide size gates have as many rows as types take together.
    """
    local = (False, True, True, False, True) if s is SMALL else (False, True, False)
    heads, near_heads, kv_heads = (HEADS, 6, KV_HEADS) if s is SMALL else (16, 32, 4)
    head = s.head if s is SMALL else 64
    config = headed(s) | {"num_attention_heads": heads, "head_dim": head}
    del config["num_key_value_heads"], config["rope_parameters"], config["pad_token_id"]
    limits = [0.0] * len(local)
    return config | {
        "num_hidden_layers": len(local),
        "num_attention_groups": kv_heads,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": near_heads,
            "num_attention_groups": kv_heads,
            "head_dim": head,
        },
        "layer_types": ["sliding_attention" if near else "full_attention" for near in local],
        "partial_rotary_factors": [1.0 if near else 0.5 for near in local],
        "rope_theta": [10000.0 if near else 50000.0 for near in local],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "yarn_only_types": ["full_attention"],
        "sliding_window": WINDOW,
        "moe_layers_enum": ",".join(map(str, range(1, len(local)))),
        # With all in use no draw is ambiguous.
        "moe_num_experts": s.experts if s is SMALL else 2,
        "moe_top_k": 2,
        "moe_intermediate_size": s.ff_expert,
        "share_expert_dim": s.ff_expert,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 1.5,
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "use_head_wise_attn_gate": True,
        "use_qk_norm": True,
        "zero_centered": True,
        "swiglu_limits": [*limits[:-1], 0.25],
        "swiglu_limits_shared": [*limits[:-2], 0.5, 0.5],
    }


CASES = [Case("step35", "Step3p5ForCausalLM", "step35", _step35)]

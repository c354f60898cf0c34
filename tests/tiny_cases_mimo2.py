"""Case of MiMo-V2-Flash."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, WINDOW, Case, Sizes, headed


def _mimo2(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    bases = {"full_attention": 50000.0, "sliding_attention": 10000.0}
    return headed(s) | {
        "num_key_value_heads": 1,
        "v_head_dim": s.value // 2,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": s.ff_expert,
        # With all in use no draw is ambiguous.
        "n_routed_experts": s.experts if s is SMALL else 2,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_value_scale": 0.7,
        "rope_parameters": {kind: rope | {"rope_theta": base} for kind, base in bases.items()},
    }


CASES = [
    Case("mimo2", "MiMoV2FlashForCausalLM", "mimo2", _mimo2),
]

"""Case of Trinity of Arcee."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WINDOW, Case, Sizes, headed


def _afmoe(s: Sizes) -> dict[str, Any]:
    return headed(s, num_hidden_layers=5) | {
        "num_key_value_heads": 1,
        "moe_intermediate_size": s.ff_expert,
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": WINDOW,
        "mup_enabled": True,
    }


CASES = [
    Case("afmoe", "AfmoeForCausalLM", "afmoe", _afmoe),
]

"""Case of Llama 4."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _llama4(s: Sizes) -> dict[str, Any]:
    return headed(s, num_hidden_layers=5) | {
        "intermediate_size": s.ff_expert,
        "intermediate_size_mlp": s.ff,
        "num_local_experts": s.experts,
        "interleave_moe_layer_step": 2,
        "floor_scale": 8192,
    }


CASES = [
    Case("llama4", "Llama4ForCausalLM", "llama4", _llama4),
]

"""Case of dots.llm1."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _dots1(s: Sizes) -> dict[str, Any]:
    return headed(s) | {
        "n_routed_experts": s.experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
    }


CASES = [
    Case("dots1", "Dots1ForCausalLM", "dots1", _dots1),
]

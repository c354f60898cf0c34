"""Case of MiniMax M2."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _minimax_m2(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return headed(s, rope_parameters=rope) | {
        "intermediate_size": s.ff_expert,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
    }


CASES = [
    Case("minimax_m2", "MiniMaxM2ForCausalLM", "minimax-m2", _minimax_m2),
]

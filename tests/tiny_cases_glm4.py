"""Cases of GLM-4 and GLM-4.5."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _glm4_moe(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return headed(s, rope_parameters=rope) | {
        "n_routed_experts": s.experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    }


def _glm4_moe_air(s: Sizes) -> dict[str, Any]:
    return _glm4_moe(s) | {"use_qk_norm": False, "n_shared_experts": 1}


def _glm4(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return headed(s, rope_parameters=rope, attention_bias=True)


CASES = [
    Case("glm4", "Glm4ForCausalLM", "glm4", _glm4),
    Case("glm4_moe", "Glm4MoeForCausalLM", "glm4moe", _glm4_moe),
    Case("glm4_moe_air", "Glm4MoeForCausalLM", "glm4moe", _glm4_moe_air),
]

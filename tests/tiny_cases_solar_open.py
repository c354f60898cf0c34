"""The case of Solar Open."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed, yarn


def _solar_open(s: Sizes) -> dict[str, Any]:
    config = headed(s, rope_parameters=yarn(factor=2.0)) | {
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    del config["intermediate_size"]  # no layer is dense
    return config


CASES = [Case("solar_open", "SolarOpenForCausalLM", "glm4moe", _solar_open)]

"""Case of Ling and Ring 2.0."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _bailing_moe_v2(s: Sizes) -> dict[str, Any]:
    config = headed(s, rope_theta=10000.0, partial_rotary_factor=0.5)
    del config["rope_parameters"]
    return config | {
        "num_experts": 12,
        "num_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 0,
    }


CASES = [
    Case("bailing_moe_v2", "BailingMoeV2ForCausalLM", "bailingmoe2", _bailing_moe_v2),
]

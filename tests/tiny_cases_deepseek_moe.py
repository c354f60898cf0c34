"""Case of DeepSeekMoE."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headless


def _deepseek_moe(s: Sizes) -> dict[str, Any]:
    config = headless(s, rope_theta=10000.0)
    del config["rope_parameters"], config["pad_token_id"]
    return config | {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "attention_bias": False,
    }


CASES = [Case("deepseek_moe", "DeepseekForCausalLM", "deepseek", _deepseek_moe)]

"""Case of Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from .tiny_cases_minicpm import both_factors
from .tiny_configs import Case, Sizes, headless


def _phimoe(s: Sizes) -> dict[str, Any]:
    config = headless(s, sliding_window=None, attention_bias=True)
    pairs = s.d // config["num_attention_heads"] // 2
    # Within the original context, as transformers takes the short factors for all texts.
    rope = both_factors(pairs, original=64) | {"short_mscale": 1.25, "long_mscale": 1.25}
    return config | {
        "intermediate_size": s.ff_expert,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
        "original_max_position_embeddings": 64,
        "rope_parameters": rope,
    }


CASES = [Case("phimoe", "PhimoeForCausalLM", "phimoe", _phimoe)]

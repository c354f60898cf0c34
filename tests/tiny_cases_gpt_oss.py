"""Case of gpt-oss."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WINDOW, Case, Sizes, headed, yarn


def _gpt_oss(s: Sizes) -> dict[str, Any]:
    # Of these sizes, borders of YaRN's ramp that are rounded to integers differ from those that are
    # not.
    rope = yarn(truncate=False, rope_theta=150000.0, original_max_position_embeddings=4096)
    return headed(s, rope_parameters=rope) | {
        "intermediate_size": s.ff_expert,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"][: s.layers],
    }


CASES = [
    Case("gpt_oss", "GptOssForCausalLM", "gpt-oss", _gpt_oss),
]

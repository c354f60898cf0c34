"""Cases of OLMo 2 and 3, OLMoE."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, KV_HEADS, SMALL, WINDOW, Case, Sizes, headless, yarn


def _olmo3(s: Sizes) -> dict[str, Any]:
    """Scaled frequencies only in the layer that sees all positions, which is the fourth; one has a
    window after it.
    """
    full = yarn(attention_factor=1.2079, rope_theta=10000.0)
    rope = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    kinds = None if s is SMALL else ["sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 5, "num_key_value_heads": KV_HEADS} if s is SMALL else {}
    return headless(s, rope_parameters=rope, sliding_window=WINDOW, **layers) | {
        "layer_types": kinds,
        **({} if s is SMALL else {"num_key_value_heads": 1}),
    }


def _olmoe(s: Sizes) -> dict[str, Any]:
    config = headless(s, num_key_value_heads=HEADS if s is SMALL else 2)
    return config | {
        "intermediate_size": s.ff_expert,
        "num_experts": s.experts,
        "num_experts_per_tok": 3,
    }


CASES = [
    Case("olmo2", "Olmo2ForCausalLM", "olmo2", lambda s: headless(s, num_key_value_heads=2)),
    Case("olmoe", "OlmoeForCausalLM", "olmoe", _olmoe),
    Case("olmo3", "Olmo3ForCausalLM", "olmo2", _olmo3),
]

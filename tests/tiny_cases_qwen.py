"""Cases of Qwen 2, 2 MoE, 3, 3 MoE, 3-Next and 3.5."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, WIDE, Case, Sizes, common, experts, headed


def _qwen2_moe(s: Sizes) -> dict[str, Any]:
    return common(s) | experts(
        s, shared_expert_intermediate_size=s.ff, norm_topk_prob=False, num_experts_per_tok=3
    )


def _delta_net(s: Sizes, values_per_key: int, **more) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    kinds = [kinds[0]] * 3 + kinds + kinds[:1] if s is SMALL else kinds
    return headed(s, num_hidden_layers=len(kinds), layer_types=kinds, rms_norm_eps=1e-6) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            **more,
        },
        "linear_key_head_dim": s.delta_head,
        "linear_value_head_dim": s.delta_head,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * values_per_key,
        "linear_conv_kernel_dim": 4,
    }


def _qwen3_next(s: Sizes) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": s.ff, "norm_topk_prob": True}
    return _delta_net(s, 2) | experts(s, **shared)


def _mrope(s: Sizes) -> dict[str, Any]:
    pairs = s.head // 8
    return {
        "mrope_interleaved": True,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }


def _qwen3_5(s: Sizes) -> dict[str, Any]:
    # Value heads are stored in another order than here: three per key head, and as many columns as
    # the width of rows asks for.
    return _delta_net(s, 4 if s is WIDE else 3, **_mrope(s))


def _qwen3_5_moe(s: Sizes) -> dict[str, Any]:
    config = _delta_net(s, 4 if s is WIDE else 3, **_mrope(s))
    del config["intermediate_size"]
    return config | experts(s, shared_expert_intermediate_size=s.ff)


CASES = [
    Case("qwen2", "Qwen2ForCausalLM", "qwen2", common),
    Case("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe", _qwen2_moe),
    Case(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        lambda s: headed(s, tie_word_embeddings=True),
    ),
    Case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        lambda s: headed(s, num_key_value_heads=1) | experts(s, norm_topk_prob=True),
    ),
    Case("qwen3_next", "Qwen3NextForCausalLM", "qwen3next", _qwen3_next),
    Case("qwen3_5", "Qwen3_5ForCausalLM", "qwen35", _qwen3_5),
    Case("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "qwen35moe", _qwen3_5_moe),
]

"""Cases of Qwen3-VL, with a small vision model that texts do not need."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, experts, headed


def _with_vision(s: Sizes, text: dict[str, Any]) -> dict[str, Any]:
    pairs = s.head // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_interleaved": True,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": s.d,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return {
        "text_config": text | {"rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": 310,  # not among the tokens of the text
        "video_token_id": 311,
        "vision_start_token_id": 312,
        "vision_end_token_id": 313,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _qwen3vl(s: Sizes) -> dict[str, Any]:
    return _with_vision(s, headed(s, tie_word_embeddings=True))


def _qwen3vl_moe(s: Sizes) -> dict[str, Any]:
    return _with_vision(s, headed(s) | experts(s, norm_topk_prob=True))


CASES = [
    Case("qwen3vl", "Qwen3VLForConditionalGeneration", "qwen3vl", _qwen3vl),
    Case("qwen3vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3vlmoe", _qwen3vl_moe),
]

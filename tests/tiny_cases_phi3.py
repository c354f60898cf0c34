"""Cases of Phi-3 and Phi-4-mini."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .tiny_configs import HEADS, ORIGINAL, Case, Sizes, common


def _phi3(s: Sizes) -> dict[str, Any]:
    return common(s, num_attention_heads=HEADS, sliding_window=None)


def _phi3_long(original: int) -> Callable[[Sizes], dict[str, Any]]:
    """`original` is above or below the length of the text, which decides about the factors."""

    def config(s: Sizes) -> dict[str, Any]:
        pairs = s.d // HEADS // 2
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1 + 0.05 * number for number in range(pairs)],
            "long_factor": [1.2 * 1.3 ** (number % 9) for number in range(pairs)],
        }
        return _phi3(s) | {
            "original_max_position_embeddings": original,
            "rope_parameters": rope | {"original_max_position_embeddings": original},
        }

    return config


CASES = [
    Case("phi3", "Phi3ForCausalLM", "phi3", _phi3),
    Case("phi3_within", "Phi3ForCausalLM", "phi3", _phi3_long(64)),
    Case("phi3_beyond", "Phi3ForCausalLM", "phi3", _phi3_long(ORIGINAL)),
]

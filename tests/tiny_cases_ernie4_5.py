"""Cases of ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, common, experts, headed


def _ernie4_5(s: Sizes) -> dict[str, Any]:
    return headed(s, tie_word_embeddings=True)


def _ernie4_5_moe(s: Sizes) -> dict[str, Any]:
    return common(s, tie_word_embeddings=True) | experts(s, moe_num_shared_experts=2)


CASES = [
    Case("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
    Case("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie4_5-moe", _ernie4_5_moe),
]

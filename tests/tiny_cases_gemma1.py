"""Case of Gemma 1."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _gemma(s: Sizes) -> dict[str, Any]:
    return headed(s, tie_word_embeddings=True)


CASES = [Case("gemma", "GemmaForCausalLM", "gemma", _gemma)]

"""Case of InternLM2."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headless


def _internlm2(s: Sizes) -> dict[str, Any]:
    config = headless(s, bias=False, rope_theta=50000.0)
    del config["rope_parameters"], config["pad_token_id"]
    return config


CASES = [Case("internlm2", "InternLM2ForCausalLM", "internlm2", _internlm2)]

"""Cases of Mellum 2."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WINDOW, Case, Sizes, experts, headed, yarn


def _mellum(s: Sizes) -> dict[str, Any]:
    """The second layer sees all positions, by a rotation that is scaled."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    rotations = {
        "full_attention": yarn(),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    more = {"layer_types": kinds[: s.layers], "sliding_window": WINDOW}
    return headed(s) | experts(s) | more | {"rope_parameters": rotations}


CASES = [Case("mellum", "MellumForCausalLM", "mellum", _mellum)]

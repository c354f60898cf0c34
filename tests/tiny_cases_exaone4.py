"""Case of EXAONE 4."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WINDOW, Case, Sizes, headed


def _exaone4(s: Sizes) -> dict[str, Any]:
    return headed(s) | {
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
    }


CASES = [
    Case("exaone4", "Exaone4ForCausalLM", "exaone4", _exaone4),
]

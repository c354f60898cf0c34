"""Cases of Command R, and Command A."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, WINDOW, Case, Sizes, common


def _cohere(s: Sizes, **more) -> dict[str, Any]:
    config = common(s, tie_word_embeddings=True, layer_norm_eps=1e-5, logit_scale=0.25, **more)
    del config["rms_norm_eps"]
    return config


def _cohere2(s: Sizes) -> dict[str, Any]:
    # The fourth layer is the one without window and rotation, and may have one after it.
    return _cohere(s, num_hidden_layers=5 if s is SMALL else 4, sliding_window=WINDOW)


CASES = [
    Case("cohere", "CohereForCausalLM", "command-r", _cohere),
    Case("cohere2", "Cohere2ForCausalLM", "cohere2", _cohere2),
]

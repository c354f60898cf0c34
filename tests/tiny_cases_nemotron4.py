"""Case of Nemotron 4 and Minitron, without Mamba."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headless


def _nemotron(s: Sizes) -> dict[str, Any]:
    config = headless(s, norm_eps=1e-5)
    del config["rms_norm_eps"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return config | {"rope_parameters": rope}


CASES = [Case("nemotron", "NemotronForCausalLM", "nemotron", _nemotron)]

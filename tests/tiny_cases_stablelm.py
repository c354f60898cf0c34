"""Case of StableLM 3B and 2 1.6B."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, headless

# What StableLM 2 12B has besides.
OF_12B = {"use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True}


def _stablelm(s: Sizes) -> dict[str, Any]:
    config = headless(s, layer_norm_eps=1e-5, use_qkv_bias=True)
    del config["rms_norm_eps"]
    part = 1 / 3 if s is SMALL else 0.25  # 4 of 12 elements, and 32 of 128
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    return config | {"rope_parameters": rope}


CASES = [Case("stablelm", "StableLmForCausalLM", "stablelm", _stablelm)]

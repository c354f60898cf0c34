"""Case of Hunyuan 3."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, experts, headed


def _hy_v3(s: Sizes) -> dict[str, Any]:
    return headed(s) | experts(s, num_shared_experts=2, router_scaling_factor=1.5)


CASES = [Case("hy_v3", "HYV3ForCausalLM", "hy_v3", _hy_v3)]

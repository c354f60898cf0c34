"""Cases of Hunyuan, dense and with experts."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, headed


def _alpha(**more) -> dict[str, Any]:
    return {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0, **more}


def _hunyuan(s: Sizes) -> dict[str, Any]:
    return headed(s, rope_parameters=_alpha(), tie_word_embeddings=True)


def _hunyuan_moe(s: Sizes) -> dict[str, Any]:
    return _hunyuan(s) | {"num_experts": s.experts, "moe_topk": 2}


CASES = [
    Case("hunyuan_dense", "HunYuanDenseV1ForCausalLM", "hunyuan-dense", _hunyuan),
    Case("hunyuan_moe", "HunYuanMoEV1ForCausalLM", "hunyuan-moe", _hunyuan_moe),
]

"""Cases of GLM-5 and DeepSeek V3.2, whose attention chooses positions."""

from __future__ import annotations

from typing import Any

from .tiny_cases_deepseek import GROUPS
from .tiny_configs import SMALL, Case, Sizes, latent, yarn


def _index(s: Sizes) -> dict[str, Any]:
    return {
        "index_topk": 12,
        "index_head_dim": s.index_head,
        # With few heads, scores of several positions are 0, and nothing says which is chosen.
        "index_n_heads": 16,
    }


def _deepseek_v32(s: Sizes) -> dict[str, Any]:
    return latent(s, rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)) | GROUPS | _index(s)


def _glm_moe_dsa(s: Sizes) -> dict[str, Any]:
    kinds = ["full", "full", "shared", "shared", "full"] if s is SMALL else ["full", "shared"]
    return latent(
        s,
        num_hidden_layers=len(kinds),
        rms_norm_eps=1e-5,
        indexer_types=kinds,
        **_index(s),
    )


CASES = [
    Case("glm_moe_dsa", "GlmMoeDsaForCausalLM", "glm-dsa", _glm_moe_dsa),
    Case("deepseek_v32", "DeepseekV32ForCausalLM", "deepseek32", _deepseek_v32),
]

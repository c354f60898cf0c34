"""Case of GLM-5, whose attention chooses positions."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, latent


def _glm_moe_dsa(s: Sizes) -> dict[str, Any]:
    kinds = ["full", "full", "shared", "shared", "full"] if s is SMALL else ["full", "shared"]
    return latent(
        s,
        num_hidden_layers=len(kinds),
        rms_norm_eps=1e-5,
        index_topk=12,
        index_head_dim=s.index_head,
        # With few heads, scores of several positions are 0, and nothing says which is chosen.
        index_n_heads=16,
        indexer_types=kinds,
    )


CASES = [
    Case("glm_moe_dsa", "GlmMoeDsaForCausalLM", "glm-dsa", _glm_moe_dsa),
]

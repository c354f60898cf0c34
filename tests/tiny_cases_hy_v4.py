"""The case of Hy4."""

from __future__ import annotations

from typing import Any

from .tiny_configs import Case, Sizes, latent


def _hy_v4(s: Sizes) -> dict[str, Any]:
    """Three residual streams that are not mixed, sinks and gates of latent attention, and a layer
    that sees what the one before it chose.
    """
    config = latent(s, num_hidden_layers=3, first_k_dense_replace=None)
    del config["first_k_dense_replace"]
    return config | {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "index_topk": 12,
        "index_head_dim": s.index_head,
        # With few heads, scores of several positions are 0, and nothing says which is chosen.
        "index_n_heads": 16,
        "swiglu_limit": 0.5,
        "hc_mult": 3,
        "hc_magnitude": 1.7,
    }


CASES = [Case("hy_v4", "HYV4ForCausalLM", "hy_v4", _hy_v4)]

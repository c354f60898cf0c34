"""Case of K-EXAONE."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WINDOW, Case, Sizes, experts, headed


def _exaone_moe(s: Sizes) -> dict[str, Any]:
    """The fourth layer is the one without a window and rotation, and there is one after it."""
    kinds = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    return headed(s, num_hidden_layers=len(kinds)) | experts(
        s,
        layer_types=kinds,
        sliding_window=WINDOW,
        sliding_window_pattern="LLLG",
        num_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        n_group=2,
        topk_group=1,
    )


CASES = [Case("exaone_moe", "ExaoneMoeForCausalLM", "exaone-moe", _exaone_moe)]

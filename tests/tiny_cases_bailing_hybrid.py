"""The case of Ling 3.0."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, SMALL, Case, Sizes, common


def _bailing_hybrid(s: Sizes) -> dict[str, Any]:
    """Delta nets whose decay has a lower bound, and latent attention with a gate for each head in
    every second layer. Experts are in groups.
    """
    # Norms of latent vectors have this epsilon whatever the config says.
    more = {"num_key_value_heads": HEADS, "rms_norm_eps": 1e-6, "num_hidden_layers": 4}
    return common(s, **more) | {
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rotated,
        "v_head_dim": s.value,
        "head_dim": 16 if s is SMALL else 128,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
        "num_local_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": s.ff_expert,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    }


CASES = [Case("bailing_hybrid", "BailingHybridForCausalLM", "bailingmoe3", _bailing_hybrid)]

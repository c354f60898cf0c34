"""The case of Kimi Linear."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, SMALL, Case, Sizes, common


def _kimi_linear(s: Sizes) -> dict[str, Any]:
    """Delta nets whose decay is per channel, and latent attention without rotation in the third
    layer. Norms of latent vectors have this epsilon whatever the config says.
    """
    more = {"num_key_value_heads": HEADS, "rms_norm_eps": 1e-6, "num_hidden_layers": 4}
    config = common(s, **more) | {
        "q_lora_rank": None,
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rotated,
        "v_head_dim": s.value,
        "num_local_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 16 if s is SMALL else 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
    }
    del config["rope_parameters"]
    return config


CASES = [Case("kimi_linear", "KimiLinearForCausalLM", "kimi-linear", _kimi_linear)]

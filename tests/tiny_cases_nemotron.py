"""Cases of Nemotron-H and Nemotron 3."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, headed

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _nemotron_h(s: Sizes, kinds: str = "M-M*M", **more) -> dict[str, Any]:
    """Steps of any size: transformers raises small ones to `time_step_min`, but only in prompts."""
    config = headed(s) | {
        "layers_block_type": [_KINDS[kind] for kind in kinds],
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4 if s is SMALL else 8,
        "mamba_head_dim": 16 if s is SMALL else 64,
        "ssm_state_size": 20 if s is SMALL else 64,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "time_step_min": 1e-30,
    }
    for key in ("num_hidden_layers", "rms_norm_eps", "rope_parameters"):
        del config[key]
    return config | more


def _nemotron_h_moe(s: Sizes, **more) -> dict[str, Any]:
    return _nemotron_h(s, "MEM*E" if s is SMALL else "ME*E") | {
        "n_routed_experts": s.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "moe_shared_expert_intermediate_size": s.ff,
        "routed_scaling_factor": 2.5,
        **more,
    }


def _nemotron_h_latent(s: Sizes) -> dict[str, Any]:
    """Experts that read and write a shorter vector."""
    return _nemotron_h_moe(s, moe_latent_size=32 if s is SMALL else 256, n_routed_experts=12)


CASES = [
    Case("nemotron_h", "NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    Case("nemotron_h_moe", "NemotronHForCausalLM", "nemotron_h_moe", _nemotron_h_moe),
    Case("nemotron_h_latent", "NemotronHForCausalLM", "nemotron_h_moe", _nemotron_h_latent),
]

"""Cases of Falcon-H1, whose layers have attention and Mamba-2 side by side."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, headed

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.75],
    "ssm_multipliers": [0.85, 1.2, 0.7, 1.3, 0.95],
}


def _falcon_h1(s: Sizes, **more) -> dict[str, Any]:
    """Without a norm of groups, as all released models."""
    mamba = {
        "mamba_d_ssm": 96 if s is SMALL else 512,
        "mamba_n_heads": 6 if s is SMALL else 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 20 if s is SMALL else 64,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "mamba_norm_before_gate": False,
    }
    return headed(s, **mamba, **MULTIPLIERS) | more


def _falcon_h1_normed(s: Sizes) -> dict[str, Any]:
    """With a norm, one group, and a tied output matrix, which has a factor of its own."""
    return _falcon_h1(s, mamba_n_groups=1, mamba_rms_norm=True, tie_word_embeddings=True)


CASES = [
    Case("falcon_h1", "FalconH1ForCausalLM", "falcon-h1", _falcon_h1),
    Case("falcon_h1_normed", "FalconH1ForCausalLM", "falcon-h1", _falcon_h1_normed),
]

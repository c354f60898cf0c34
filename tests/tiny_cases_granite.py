"""Cases of Granite 3 and 4, dense, with experts, with Mamba and with windows."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, WINDOW, Case, Sizes, common

FACTORS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}


def _granite(s: Sizes) -> dict[str, Any]:
    return common(s, tie_word_embeddings=True, **FACTORS)


def _granite_moe(s: Sizes) -> dict[str, Any]:
    return common(s, intermediate_size=s.ff_expert, tie_word_embeddings=True, **FACTORS) | {
        "num_local_experts": s.experts,
        "num_experts_per_tok": 3,
    }


def _granite_moe_shared(s: Sizes) -> dict[str, Any]:
    more = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    return _granite_moe(s) | more | {"shared_intermediate_size": s.ff}


def _granite4(s: Sizes) -> dict[str, Any]:
    """Without Mamba, whose sizes the class checks all the same, and without experts."""
    return common(s, tie_word_embeddings=True, **FACTORS) | {
        "layer_types": ["attention"] * s.layers,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": s.ff,
        "mamba_n_heads": 2,
    }


def _granite_hybrid(s: Sizes, **more) -> dict[str, Any]:
    """With Mamba and experts; heads of all layers and groups are of other numbers."""
    mamba = {
        "mamba_n_heads": 6 if s is SMALL else 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 20 if s is SMALL else 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    }
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return _granite_moe_shared(s) | {"layer_types": kinds[: s.layers]} | mamba | more


def _granite_hybrid_dense(s: Sizes) -> dict[str, Any]:
    """Without experts; heads are rotated."""
    more = {"intermediate_size": s.ff, "tie_word_embeddings": True}
    more |= {"position_embedding_type": "rope"}
    return _granite_hybrid(s, num_local_experts=0, num_experts_per_tok=0, **more)


def _granite_swa(s: Sizes) -> dict[str, Any]:
    """The first layer of four, and the last one here, sees all positions; the second one has no
    rotation.
    """
    n = 5 if s is SMALL else 4
    more = {"num_hidden_layers": n, "sliding_window": WINDOW}
    bases = [50000.0, 0, *[50000.0] * (n - 2)]
    return common(s, tie_word_embeddings=True, **FACTORS) | more | {"layer_rope_theta": bases}


def _granite_moe_swa(s: Sizes) -> dict[str, Any]:
    """With experts and a shared one; every layer rotates heads."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"][: s.layers]
    return _granite_moe_shared(s) | {"layer_types": kinds, "sliding_window": WINDOW}


CASES = [
    Case("granite", "GraniteForCausalLM", "granite", _granite),
    Case("granite_moe", "GraniteMoeForCausalLM", "granitemoe", _granite_moe),
    Case("granite_moe_shared", "GraniteMoeSharedForCausalLM", "granitemoe", _granite_moe_shared),
    Case("granite4", "GraniteMoeHybridForCausalLM", "granite", _granite4),
    Case("granite_hybrid", "GraniteMoeHybridForCausalLM", "granitehybrid", _granite_hybrid),
    Case(
        "granite_hybrid_dense",
        "GraniteMoeHybridForCausalLM",
        "granitehybrid",
        _granite_hybrid_dense,
    ),
    Case("granite_swa", "GraniteSWAForCausalLM", "granite_swa", _granite_swa),
    Case("granite_moe_swa", "GraniteMoeSWAForCausalLM", "granite_swa", _granite_moe_swa),
]

"""Cases of Gemma 2, 3 and 4."""

from __future__ import annotations

from typing import Any

from .tiny_configs import KV_HEADS, N_VOCAB, SMALL, WINDOW, Case, Sizes, headed


def _gemma2(s: Sizes) -> dict[str, Any]:
    return headed(
        s,
        tie_word_embeddings=True,
        query_pre_attn_scalar=s.head,
        sliding_window=WINDOW,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,
    )


def _gemma3(s: Sizes) -> dict[str, Any]:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return headed(
        s,
        num_hidden_layers=7 if s is SMALL else 6,  # every sixth is global
        tie_word_embeddings=True,
        query_pre_attn_scalar=s.head,
        sliding_window=WINDOW,
        rope_parameters=ropes,
    )


def _gemma4(s: Sizes, kinds: str, global_kv_heads: int, **more) -> dict[str, Any]:
    layers = {"l": "sliding_attention", "g": "full_attention"}
    return headed(
        s,
        num_hidden_layers=len(kinds),
        layer_types=[layers[kind] for kind in kinds],
        tie_word_embeddings=True,
        sliding_window=WINDOW,
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        per_layer_config={
            str(layer): {"head_dim": 2 * s.head, "num_key_value_heads": global_kv_heads}
            for layer, kind in enumerate(kinds)
            if kind == "g"
        },
        vocab_size_per_layer_input=N_VOCAB,
        **more,
    )


def _gemma4_moe(s: Sizes) -> dict[str, Any]:
    return _gemma4(
        s,
        "llglg" if s is SMALL else "lg",
        1,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=s.experts,
        top_k_experts=2,
        moe_intermediate_size=s.ff_expert,
    )


def _gemma4_e(s: Sizes) -> dict[str, Any]:
    return _gemma4(
        s,
        "llglglg" if s is SMALL else "lglg",
        KV_HEADS,
        hidden_size_per_layer_input=s.per_layer,
        num_kv_shared_layers=3 if s is SMALL else 2,
        use_double_wide_mlp=True,
    )


CASES = [
    Case("gemma2", "Gemma2ForCausalLM", "gemma2", _gemma2),
    Case("gemma3", "Gemma3ForCausalLM", "gemma3", _gemma3),
    Case("gemma4_moe", "Gemma4ForCausalLM", "gemma4", _gemma4_moe),
    Case("gemma4_e", "Gemma4ForCausalLM", "gemma4", _gemma4_e),
]

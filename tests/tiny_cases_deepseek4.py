"""Cases of DeepSeek V4: entries for runs of positions, residual streams, experts by token."""

from __future__ import annotations

from typing import Any

from .tiny_configs import N_VOCAB, SMALL, WINDOW, Case, Sizes, yarn

_NEAR, _CHOSEN, _LONG = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


def _deepseek_v4(s: Sizes) -> dict[str, Any]:
    kinds = [_NEAR, _CHOSEN, _LONG, _CHOSEN, _LONG] if s is SMALL else [_CHOSEN, _LONG]
    return {
        "vocab_size": N_VOCAB,
        "hidden_size": s.d,
        "moe_intermediate_size": s.ff_expert,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": s.head,
        "partial_rotary_factor": s.rotated / s.head,
        "q_lora_rank": s.q_rank,
        "o_groups": 2,
        "o_lora_rank": 20 if s is SMALL else 128,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_parameters": yarn(),
        "compress_rope_theta": 40000.0,
        "layer_types": kinds,
        "compress_rates": {_CHOSEN: 4, _LONG: 8},
        "mlp_layer_types": ["hash_moe"] * (len(kinds) // 2)
        + ["moe"] * (len(kinds) - len(kinds) // 2),
        "hc_mult": 3 if s is SMALL else 4,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 1.0,
        "sliding_window": WINDOW,
        "index_n_heads": 16,
        "index_head_dim": s.index_head,
        "index_topk": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


CASES = [Case("deepseek_v4", "DeepseekV4ForCausalLM", "deepseek4", _deepseek_v4)]

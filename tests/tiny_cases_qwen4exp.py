"""The case of Qwen3.8-Flash-Next."""

from __future__ import annotations

from typing import Any

from .tiny_configs import WIDE, Case, Sizes, experts, headed


def _qwen4exp(s: Sizes) -> dict[str, Any]:
    """Three residual streams; delta nets whose gates are sigmoids, and attention to blocks of
    positions in every second layer; the first layer adds embeddings of n-grams.
    """
    pairs = s.head // 8
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = headed(s, num_hidden_layers=len(kinds), layer_types=kinds, rms_norm_eps=1e-6)
    del config["intermediate_size"]
    return (
        config
        | experts(s, shared_expert_intermediate_size=s.ff)
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            },
            "linear_key_head_dim": s.delta_head,
            "linear_value_head_dim": s.delta_head,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8 if s is WIDE else 6,
            "linear_conv_kernel_dim": 4,
            "output_gate_type": "sigmoid",
            "hc_count": 3,
            "hc_lowrank": 256 if s is WIDE else 20,
            # With few heads, scores of several blocks are 0, and nothing says which is chosen.
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": s.index_head,
            "indexer_budget": 12,
            "indexer_compress_ratio": 4,
            "ple_layer_ids": [1],
            "ple_embed_dim": 4 * 256 if s is WIDE else s.d,
            "ple_conv_kernel_size": 4,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 31,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 4,
        }
    )


CASES = [Case("qwen4exp", "Qwen4ExpForCausalLM", "qwen4exp", _qwen4exp)]

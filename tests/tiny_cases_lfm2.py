"""Cases of LFM2, dense and with experts."""

from __future__ import annotations

from typing import Any

from .tiny_configs import HEADS, SMALL, Case, Sizes, common, experts


def _lfm2(s: Sizes, **more) -> dict[str, Any]:
    """A convolution before attention, and in the small size one after it."""
    kinds = ["conv", "full_attention", "conv"][: s.layers]
    config = common(s, num_attention_heads=HEADS if s is SMALL else 2, num_key_value_heads=1)
    del config["rms_norm_eps"]
    return config | {
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "layer_types": kinds,
        "conv_L_cache": 3,
        "block_multiple_of": 8 if s is SMALL else 256,
        **more,
    }


def _lfm2_moe(s: Sizes) -> dict[str, Any]:
    config = _lfm2(s, num_dense_layers=1)
    del config["block_multiple_of"]
    return config | experts(s)


CASES = [
    Case("lfm2", "Lfm2ForCausalLM", "lfm2", _lfm2),
    Case("lfm2_moe", "Lfm2MoeForCausalLM", "lfm2moe", _lfm2_moe),
]

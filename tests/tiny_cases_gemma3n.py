"""Case of Gemma 3n."""

from __future__ import annotations

from typing import Any

from .tiny_configs import N_VOCAB, SMALL, WINDOW, Case, Sizes, headed

_KINDS = {"l": "sliding_attention", "g": "full_attention"}


def _gemma3n(s: Sizes) -> dict[str, Any]:
    kinds = "llglglg" if s is SMALL else "lglg"
    sparse = (0.6, 0.0, 0.95) if s is SMALL else (0.9,)
    n = len(kinds)
    return headed(
        s,
        num_hidden_layers=n,
        intermediate_size=[s.ff] * n,
        layer_types=[_KINDS[kind] for kind in kinds],
        activation_sparsity_pattern=[*sparse, *[0.0] * (n - len(sparse))],
        tie_word_embeddings=True,
        sliding_window=WINDOW,
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        vocab_size_per_layer_input=N_VOCAB,
        hidden_size_per_layer_input=s.per_layer,
        num_kv_shared_layers=3 if s is SMALL else 2,
        laurel_rank=20 if s is SMALL else 64,
        altup_num_inputs=4,
    )


CASES = [Case("gemma3n", "Gemma3nForCausalLM", "gemma3n", _gemma3n)]

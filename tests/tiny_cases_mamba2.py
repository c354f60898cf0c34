"""The case of models of Mamba-2 alone."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, common

_OF_ALL = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")


def _mamba2(s: Sizes) -> dict[str, Any]:
    usual = common(s)
    return {key: usual[key] for key in (*_OF_ALL, "tie_word_embeddings")} | {
        "num_hidden_layers": 3 if s is SMALL else 4,
        "num_heads": 6 if s is SMALL else 8,
        "head_dim": 16 if s is SMALL else 64,
        "state_size": 20 if s is SMALL else 64,
        "n_groups": 2,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
    }


CASES = [Case("mamba2", "Mamba2ForCausalLM", "mamba2", _mamba2)]

"""Cases of the first Mamba, and of Falcon-Mamba, which norms steps and vectors."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, common

_OF_ALL = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")


def _mamba(s: Sizes) -> dict[str, Any]:
    usual = common(s)
    return {key: usual[key] for key in _OF_ALL} | {
        "num_hidden_layers": 3 if s is SMALL else 4,
        "state_size": 20 if s is SMALL else 16,
        "time_step_rank": 5 if s is SMALL else 256,
        "tie_word_embeddings": True,
        "use_associative_scan": False,
    }


def _falcon_mamba(s: Sizes) -> dict[str, Any]:
    return _mamba(s) | {"tie_word_embeddings": False}


CASES = [
    Case("mamba", "MambaForCausalLM", "mamba", _mamba),
    Case("falcon_mamba", "FalconMambaForCausalLM", "mamba", _falcon_mamba),
]

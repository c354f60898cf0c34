"""Cases of Jamba."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, Case, Sizes, common


def _jamba(s: Sizes) -> dict[str, Any]:
    """The second layer attends and has experts."""
    config = common(s) | {
        "num_hidden_layers": 3 if s is SMALL else 2,
        "num_attention_heads": 4 if s is SMALL else 2,
        "num_experts": s.experts,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 20 if s is SMALL else 16,
        "mamba_dt_rank": 5 if s is SMALL else 256,
        "use_associative_scan": False,
    }
    del config["rope_parameters"]
    return config


CASES = [Case("jamba", "JambaForCausalLM", "jamba", _jamba)]

"""Cases of Command R, Command A and Command A+, and North Mini Code."""

from __future__ import annotations

from typing import Any

from .tiny_configs import SMALL, WINDOW, Case, Sizes, common, headed


def _cohere(s: Sizes, **more) -> dict[str, Any]:
    config = common(s, tie_word_embeddings=True, layer_norm_eps=1e-5, logit_scale=0.25, **more)
    del config["rms_norm_eps"]
    return config


def _cohere2(s: Sizes) -> dict[str, Any]:
    # The fourth layer is the one without window and rotation, and may have one after it.
    return _cohere(s, num_hidden_layers=5 if s is SMALL else 4, sliding_window=WINDOW)


def _cohere2_moe(s: Sizes) -> dict[str, Any]:
    """The first and the fifth layer have no window; of these, the dense one rotates heads."""
    config = headed(s, num_hidden_layers=6 if s is SMALL else 5, tie_word_embeddings=True)
    return config | {
        "intermediate_size": s.ff_expert,
        "prefix_dense_intermediate_size": s.ff,
        "first_k_dense_replace": 1,
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "logit_scale": 0.25,
        "sliding_window": WINDOW,
    }


def _command_a_plus(s: Sizes) -> dict[str, Any]:
    """LayerNorms, shared experts, and no dense layer; the fourth layer is the one without a window
    and rotation.
    """
    return _cohere2_moe(s) | {
        "num_hidden_layers": 5 if s is SMALL else 4,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "num_shared_experts": 2,
        "rms_norm_eps": None,
        "layer_norm_eps": 1e-5,
    }


CASES = [
    Case("cohere", "CohereForCausalLM", "command-r", _cohere),
    Case("cohere2", "Cohere2ForCausalLM", "cohere2", _cohere2),
    Case("cohere2_moe", "Cohere2MoeForCausalLM", "cohere2moe", _cohere2_moe),
    Case("command_a_plus", "Cohere2MoeForCausalLM", "cohere2moe", _command_a_plus),
]

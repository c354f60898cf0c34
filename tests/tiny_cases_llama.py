"""Cases of Llama, Mistral and Mixtral, Ministral 3, Mistral 4."""

from __future__ import annotations

from typing import Any

from .tiny_configs import ORIGINAL, Case, Sizes, common, headed, latent, yarn


def _llama3(s: Sizes) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    return headed(s, rope_parameters=rope, tie_word_embeddings=True)


def _ministral3(s: Sizes) -> dict[str, Any]:
    rope = yarn(
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, max_position_embeddings=512
    )
    return headed(s, rope_parameters=rope)


def _mistral4(s: Sizes) -> dict[str, Any]:
    rope = yarn(
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.2,
        max_position_embeddings=512,
        partial_rotary_factor=s.rotated / (s.nope + s.rotated),
    )
    text = latent(s, first_k_dense_replace=0, rope_parameters=rope)
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    return {
        "text_config": text | {"model_type": "mistral4"},
        "vision_config": vision,
        "image_token_index": 310,
        "tie_word_embeddings": False,
    }


CASES = [
    Case("llama", "LlamaForCausalLM", "llama", headed),
    Case("llama3", "LlamaForCausalLM", "llama", _llama3),
    Case("mistral", "MistralForCausalLM", "llama", lambda s: headed(s, sliding_window=None)),
    Case(
        "mixtral",
        "MixtralForCausalLM",
        "llama",
        lambda s: (
            common(s, sliding_window=None)
            | {
                "num_local_experts": s.experts,
                "num_experts_per_tok": 2,
                "intermediate_size": s.ff_expert,
            }
        ),
    ),
    Case("ministral3", "Ministral3ForCausalLM", "mistral3", _ministral3),
    Case("mistral4", "Mistral3ForConditionalGeneration", "mistral4", _mistral4),
]

"""Configs of tiny models of every class that is converted. `tiny_models` draws their weights.

Every case exists in two sizes. `SMALL` breaks symmetries: no two sizes that a mistake could confuse
are equal, layer counts are odd, heads are grouped, biases and norms are random, and texts are
longer than windows and original contexts. `WIDE` has rows of 256 weights and more, so that every
type applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

N_VOCAB = 320
N_TOKENS = 40  # longer than WINDOW and than ORIGINAL
WINDOW = 7
ORIGINAL = 16  # context length before scaling


@dataclass(frozen=True)
class Sizes:
    name: str
    d: int
    ff: int
    ff_expert: int
    head: int
    nope: int
    rotated: int
    value: int
    q_rank: int
    kv_rank: int
    delta_head: int
    index_head: int
    per_layer: int
    layers: int
    experts: int


SMALL = Sizes("small", 48, 56, 28, 24, 20, 12, 16, 36, 40, 16, 16, 12, layers=3, experts=6)
WIDE = Sizes("wide", 256, 512, 256, 128, 192, 64, 128, 256, 256, 64, 128, 256, layers=2, experts=4)
SIZES = {size.name: size for size in (SMALL, WIDE)}

HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class Case:
    """A model class and what its config sets: `config(sizes)` are the keywords of the config class.
    `architecture` is the name in GGUF.
    """

    name: str
    hf_class: str
    architecture: str
    config: Callable[[Sizes], dict[str, Any]]
    renamed: tuple[str, str] | None = None  # in names of tensors: what is saved, what is published


def _common(s: Sizes, **more) -> dict[str, Any]:
    return {
        "vocab_size": N_VOCAB,
        "hidden_size": s.d,
        "intermediate_size": s.ff,
        "num_hidden_layers": s.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **more,
    }


def _headed(s: Sizes, **more) -> dict[str, Any]:
    return _common(s, head_dim=s.head, **more)


def yarn(**more) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **more,
    }


def _llama3(s: Sizes) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    return _headed(s, rope_parameters=rope, tie_word_embeddings=True)


def _ministral3(s: Sizes) -> dict[str, Any]:
    rope = yarn(
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, max_position_embeddings=512
    )
    return _headed(s, rope_parameters=rope)


def _experts(s: Sizes, **more) -> dict[str, Any]:
    return {
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
    } | more


def _latent(s: Sizes, **more) -> dict[str, Any]:
    return _common(s, num_key_value_heads=HEADS) | {
        "q_lora_rank": s.q_rank,
        "kv_lora_rank": s.kv_rank,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rotated,
        "v_head_dim": s.value,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        # The norms of the latents have this one whatever the config says.
        "rms_norm_eps": 1e-6,
        **more,
    }


GROUPS = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}


def _deepseek_v2_lite(s: Sizes) -> dict[str, Any]:
    return _latent(
        s,
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_parameters=yarn(**MSCALE),
    )


def _deepseek_v2(s: Sizes) -> dict[str, Any]:
    return _latent(
        s, topk_method="group_limited_greedy", norm_topk_prob=False, routed_scaling_factor=4.0
    ) | {**GROUPS, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)}


def _deepseek_v3(s: Sizes) -> dict[str, Any]:
    rope = yarn(mscale=1.0, mscale_all_dim=1.0)
    return _latent(s, num_mtp_layers=0, rope_parameters=rope) | GROUPS


def _kimi_k2(s: Sizes) -> dict[str, Any]:
    """One group."""
    rope = yarn(mscale=1.0, mscale_all_dim=1.0)
    return _latent(s, num_mtp_layers=0, routed_scaling_factor=2.827, rope_parameters=rope)


def _kimi_k25(s: Sizes) -> dict[str, Any]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    return {
        # Wide enough for every type in `attn_k_b`, whose rows are the unrotated part of a head.
        "text_config": _kimi_k2(s)
        | {"model_type": "deepseek_v3", "qk_nope_head_dim": 256 if s is WIDE else s.nope},
        "vision_config": vision,
        "projection_hidden_size": 16,
        "image_token_id": 310,  # not among the tokens of the text
        "tie_word_embeddings": False,
    }


def _glm4_moe_lite(s: Sizes) -> dict[str, Any]:
    config = _latent(s, routed_scaling_factor=1.8, rms_norm_eps=1e-5)
    del config["first_k_dense_replace"]
    return config


def _glm_moe_dsa(s: Sizes) -> dict[str, Any]:
    kinds = ["full", "full", "shared", "shared", "full"] if s is SMALL else ["full", "shared"]
    return _latent(
        s,
        num_hidden_layers=len(kinds),
        rms_norm_eps=1e-5,
        index_topk=12,
        index_head_dim=s.index_head,
        # With few heads, scores of several positions are 0, and nothing says which is chosen.
        index_n_heads=16,
        indexer_types=kinds,
    )


def _mistral4(s: Sizes) -> dict[str, Any]:
    rope = yarn(
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.2,
        max_position_embeddings=512,
        partial_rotary_factor=s.rotated / (s.nope + s.rotated),
    )
    text = _latent(s, first_k_dense_replace=0, rope_parameters=rope)
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


def _qwen2_moe(s: Sizes) -> dict[str, Any]:
    return _common(s) | _experts(
        s, shared_expert_intermediate_size=s.ff, norm_topk_prob=False, num_experts_per_tok=3
    )


def _delta_net(s: Sizes, values_per_key: int, **more) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    kinds = [kinds[0]] * 3 + kinds + kinds[:1] if s is SMALL else kinds
    return _headed(s, num_hidden_layers=len(kinds), layer_types=kinds, rms_norm_eps=1e-6) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            **more,
        },
        "linear_key_head_dim": s.delta_head,
        "linear_value_head_dim": s.delta_head,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * values_per_key,
        "linear_conv_kernel_dim": 4,
    }


def _qwen3_next(s: Sizes) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": s.ff, "norm_topk_prob": True}
    return _delta_net(s, 2) | _experts(s, **shared)


def _mrope(s: Sizes) -> dict[str, Any]:
    pairs = s.head // 8
    return {
        "mrope_interleaved": True,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }


def _qwen3_5(s: Sizes) -> dict[str, Any]:
    # Value heads are stored in another order than here: three per key head, and as many columns as
    # the width of rows asks for.
    return _delta_net(s, 4 if s is WIDE else 3, **_mrope(s))


def _qwen3_5_moe(s: Sizes) -> dict[str, Any]:
    config = _delta_net(s, 4 if s is WIDE else 3, **_mrope(s))
    del config["intermediate_size"]
    return config | _experts(s, shared_expert_intermediate_size=s.ff)


def _glm4_moe(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return _headed(s, rope_parameters=rope) | {
        "n_routed_experts": s.experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_mtp_layers": 0,
    }


def _glm4_moe_air(s: Sizes) -> dict[str, Any]:
    return _glm4_moe(s) | {"use_qk_norm": False, "n_shared_experts": 1}


def _glm4(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return _headed(s, rope_parameters=rope, attention_bias=True)


def _bailing_moe_v2(s: Sizes) -> dict[str, Any]:
    config = _headed(s, rope_theta=10000.0, partial_rotary_factor=0.5)
    del config["rope_parameters"]
    return config | {
        "num_experts": 12,
        "num_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 0,
    }


def _dots1(s: Sizes) -> dict[str, Any]:
    return _headed(s) | {
        "n_routed_experts": s.experts,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
    }


def _exaone4(s: Sizes) -> dict[str, Any]:
    return _headed(s) | {
        "num_hidden_layers": 5,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
    }


def _alpha(**more) -> dict[str, Any]:
    return {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0, **more}


def _hunyuan(s: Sizes) -> dict[str, Any]:
    return _headed(s, rope_parameters=_alpha(), tie_word_embeddings=True)


def _hunyuan_moe(s: Sizes) -> dict[str, Any]:
    return _hunyuan(s) | {"num_experts": s.experts, "moe_topk": 2}


def _minimax_m2(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return _headed(s, rope_parameters=rope) | {
        "intermediate_size": s.ff_expert,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
    }


def _afmoe(s: Sizes) -> dict[str, Any]:
    return _headed(s, num_hidden_layers=5) | {
        "num_key_value_heads": 1,
        "moe_intermediate_size": s.ff_expert,
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": WINDOW,
        "mup_enabled": True,
    }


def _mimo2(s: Sizes) -> dict[str, Any]:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    bases = {"full_attention": 50000.0, "sliding_attention": 10000.0}
    return _headed(s) | {
        "num_key_value_heads": 1,
        "v_head_dim": s.value // 2,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": s.ff_expert,
        # With all in use no draw is ambiguous.
        "n_routed_experts": s.experts if s is SMALL else 2,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_value_scale": 0.7,
        "rope_parameters": {kind: rope | {"rope_theta": base} for kind, base in bases.items()},
    }


def _llama4(s: Sizes) -> dict[str, Any]:
    return _headed(s, num_hidden_layers=5) | {
        "intermediate_size": s.ff_expert,
        "intermediate_size_mlp": s.ff,
        "num_local_experts": s.experts,
        "interleave_moe_layer_step": 2,
        "floor_scale": 8192,
    }


def _headless(s: Sizes, **more) -> dict[str, Any]:
    """For classes whose heads are as long as the width has room for: of a length that kernels
    take.
    """
    return _common(s, num_attention_heads=HEADS if s is SMALL else 2, **more)


def _olmo3(s: Sizes) -> dict[str, Any]:
    """Scaled frequencies only in the layer that sees all positions, which is the fourth; one has a
    window after it.
    """
    full = yarn(attention_factor=1.2079, rope_theta=10000.0)
    rope = {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    kinds = None if s is SMALL else ["sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": 5, "num_key_value_heads": KV_HEADS} if s is SMALL else {}
    return _headless(s, rope_parameters=rope, sliding_window=WINDOW, **layers) | {
        "layer_types": kinds,
        **({} if s is SMALL else {"num_key_value_heads": 1}),
    }


def _olmoe(s: Sizes) -> dict[str, Any]:
    config = _headless(s, num_key_value_heads=HEADS if s is SMALL else 2)
    return config | {
        "intermediate_size": s.ff_expert,
        "num_experts": s.experts,
        "num_experts_per_tok": 3,
    }


def _gemma2(s: Sizes) -> dict[str, Any]:
    return _headed(
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
    return _headed(
        s,
        num_hidden_layers=7 if s is SMALL else 6,  # every sixth is global
        tie_word_embeddings=True,
        query_pre_attn_scalar=s.head,
        sliding_window=WINDOW,
        rope_parameters=ropes,
    )


def _gemma4(s: Sizes, kinds: str, global_kv_heads: int, **more) -> dict[str, Any]:
    layers = {"l": "sliding_attention", "g": "full_attention"}
    return _headed(
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


def _gpt_oss(s: Sizes) -> dict[str, Any]:
    # Of these sizes, borders of YaRN's ramp that are rounded to integers differ from those that are
    # not.
    rope = yarn(truncate=False, rope_theta=150000.0, original_max_position_embeddings=4096)
    return _headed(s, rope_parameters=rope) | {
        "intermediate_size": s.ff_expert,
        "num_local_experts": s.experts,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"][: s.layers],
    }


def _phi3(s: Sizes) -> dict[str, Any]:
    return _common(s, num_attention_heads=HEADS, sliding_window=None)


def _phi3_long(original: int) -> Callable[[Sizes], dict[str, Any]]:
    """`original` is above or below the length of the text, which decides about the factors."""

    def config(s: Sizes) -> dict[str, Any]:
        pairs = s.d // HEADS // 2
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1 + 0.05 * number for number in range(pairs)],
            "long_factor": [1.2 * 1.3 ** (number % 9) for number in range(pairs)],
        }
        return _phi3(s) | {
            "original_max_position_embeddings": original,
            "rope_parameters": rope | {"original_max_position_embeddings": original},
        }

    return config


def _smollm3(s: Sizes) -> dict[str, Any]:
    # The fourth layer is the one without rotation, and there is one after it.
    return _common(s, num_hidden_layers=5, tie_word_embeddings=True)


def _starcoder2(s: Sizes) -> dict[str, Any]:
    config = _common(s, norm_epsilon=1e-5, use_bias=True, sliding_window=None)
    del config["rms_norm_eps"]
    return config


def _ernie4_5(s: Sizes) -> dict[str, Any]:
    return _headed(s, tie_word_embeddings=True)


def _ernie4_5_moe(s: Sizes) -> dict[str, Any]:
    return _common(s, tie_word_embeddings=True) | _experts(s, moe_num_shared_experts=2)


def _lfm2(s: Sizes, **more) -> dict[str, Any]:
    """A convolution before attention, and in the small size one after it."""
    kinds = ["conv", "full_attention", "conv"][: s.layers]
    config = _common(s, num_attention_heads=HEADS if s is SMALL else 2, num_key_value_heads=1)
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
    return config | _experts(s)


FACTORS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}


def _granite(s: Sizes) -> dict[str, Any]:
    return _common(s, tie_word_embeddings=True, **FACTORS)


def _granite_moe(s: Sizes) -> dict[str, Any]:
    return _common(s, intermediate_size=s.ff_expert, tie_word_embeddings=True, **FACTORS) | {
        "num_local_experts": s.experts,
        "num_experts_per_tok": 3,
    }


def _granite_moe_shared(s: Sizes) -> dict[str, Any]:
    more = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    return _granite_moe(s) | more | {"shared_intermediate_size": s.ff}


def _granite4(s: Sizes) -> dict[str, Any]:
    """Without Mamba, whose sizes the class checks all the same, and without experts."""
    return _common(s, tie_word_embeddings=True, **FACTORS) | {
        "layer_types": ["attention"] * s.layers,
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": s.ff,
        "mamba_n_heads": 2,
    }


_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _nemotron_h(s: Sizes, kinds: str = "M-M*M", **more) -> dict[str, Any]:
    """Steps of any size: transformers raises small ones to `time_step_min`, but only in prompts."""
    config = _headed(s) | {
        "layers_block_type": [_KINDS[kind] for kind in kinds],
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4 if s is SMALL else 8,
        "mamba_head_dim": 16 if s is SMALL else 64,
        "ssm_state_size": 20 if s is SMALL else 64,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "time_step_min": 1e-30,
    }
    for key in ("num_hidden_layers", "rms_norm_eps", "rope_parameters"):
        del config[key]
    return config | more


def _nemotron_h_moe(s: Sizes, **more) -> dict[str, Any]:
    return _nemotron_h(s, "MEM*E" if s is SMALL else "ME*E") | {
        "n_routed_experts": s.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
        "moe_shared_expert_intermediate_size": s.ff,
        "routed_scaling_factor": 2.5,
        **more,
    }


def _nemotron_h_latent(s: Sizes) -> dict[str, Any]:
    """Experts that read and write a shorter vector."""
    return _nemotron_h_moe(s, moe_latent_size=32 if s is SMALL else 256, n_routed_experts=12)


def _granite_hybrid(s: Sizes, **more) -> dict[str, Any]:
    """With Mamba and experts; heads of all layers and groups are of other numbers."""
    mamba = {
        "mamba_n_heads": 6 if s is SMALL else 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 20 if s is SMALL else 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    }
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return _granite_moe_shared(s) | {"layer_types": kinds[: s.layers]} | mamba | more


def _granite_hybrid_dense(s: Sizes) -> dict[str, Any]:
    """Without experts; heads are rotated."""
    more = {"intermediate_size": s.ff, "tie_word_embeddings": True}
    more |= {"position_embedding_type": "rope"}
    return _granite_hybrid(s, num_local_experts=0, num_experts_per_tok=0, **more)


def _cohere(s: Sizes, **more) -> dict[str, Any]:
    config = _common(s, tie_word_embeddings=True, layer_norm_eps=1e-5, logit_scale=0.25, **more)
    del config["rms_norm_eps"]
    return config


def _cohere2(s: Sizes) -> dict[str, Any]:
    # The fourth layer is the one without window and rotation, and may have one after it.
    return _cohere(s, num_hidden_layers=5 if s is SMALL else 4, sliding_window=WINDOW)


CASES = {
    case.name: case
    for case in (
        Case("llama", "LlamaForCausalLM", "llama", _headed),
        Case("llama3", "LlamaForCausalLM", "llama", _llama3),
        Case("mistral", "MistralForCausalLM", "llama", lambda s: _headed(s, sliding_window=None)),
        Case(
            "mixtral",
            "MixtralForCausalLM",
            "llama",
            lambda s: (
                _common(s, sliding_window=None)
                | {
                    "num_local_experts": s.experts,
                    "num_experts_per_tok": 2,
                    "intermediate_size": s.ff_expert,
                }
            ),
        ),
        Case("ministral3", "Ministral3ForCausalLM", "mistral3", _ministral3),
        Case("mistral4", "Mistral3ForConditionalGeneration", "mistral4", _mistral4),
        Case("qwen2", "Qwen2ForCausalLM", "qwen2", _common),
        Case("qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe", _qwen2_moe),
        Case(
            "qwen3",
            "Qwen3ForCausalLM",
            "qwen3",
            lambda s: _headed(s, tie_word_embeddings=True),
        ),
        Case(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "qwen3moe",
            lambda s: _headed(s, num_key_value_heads=1) | _experts(s, norm_topk_prob=True),
        ),
        Case("qwen3_next", "Qwen3NextForCausalLM", "qwen3next", _qwen3_next),
        Case("qwen3_5", "Qwen3_5ForCausalLM", "qwen35", _qwen3_5),
        Case("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "qwen35moe", _qwen3_5_moe),
        Case("deepseek_v2_lite", "DeepseekV2ForCausalLM", "deepseek2", _deepseek_v2_lite),
        Case("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek2", _deepseek_v2),
        Case("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek2", _deepseek_v3),
        Case("kimi_k2", "DeepseekV3ForCausalLM", "deepseek2", _kimi_k2),
        Case(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            "deepseek2",
            _kimi_k25,
            # transformers saves the text model's layers under the name of the vision model's
            renamed=("language_model.model.blocks.", "language_model.model.layers."),
        ),
        Case("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "deepseek2", _glm4_moe_lite),
        Case("arcee", "ArceeForCausalLM", "arcee", lambda s: _common(s, rope_parameters=yarn())),
        Case("glm4", "Glm4ForCausalLM", "glm4", _glm4),
        Case("glm4_moe", "Glm4MoeForCausalLM", "glm4moe", _glm4_moe),
        Case("glm4_moe_air", "Glm4MoeForCausalLM", "glm4moe", _glm4_moe_air),
        Case("bailing_moe_v2", "BailingMoeV2ForCausalLM", "bailingmoe2", _bailing_moe_v2),
        Case("dots1", "Dots1ForCausalLM", "dots1", _dots1),
        Case("exaone4", "Exaone4ForCausalLM", "exaone4", _exaone4),
        Case("hunyuan_dense", "HunYuanDenseV1ForCausalLM", "hunyuan-dense", _hunyuan),
        Case("hunyuan_moe", "HunYuanMoEV1ForCausalLM", "hunyuan-moe", _hunyuan_moe),
        Case("afmoe", "AfmoeForCausalLM", "afmoe", _afmoe),
        Case("mimo2", "MiMoV2FlashForCausalLM", "mimo2", _mimo2),
        Case("llama4", "Llama4ForCausalLM", "llama4", _llama4),
        Case("minimax_m2", "MiniMaxM2ForCausalLM", "minimax-m2", _minimax_m2),
        Case("olmo2", "Olmo2ForCausalLM", "olmo2", lambda s: _headless(s, num_key_value_heads=2)),
        Case("olmoe", "OlmoeForCausalLM", "olmoe", _olmoe),
        Case("olmo3", "Olmo3ForCausalLM", "olmo2", _olmo3),
        Case("lfm2", "Lfm2ForCausalLM", "lfm2", _lfm2),
        Case("lfm2_moe", "Lfm2MoeForCausalLM", "lfm2moe", _lfm2_moe),
        Case("glm_moe_dsa", "GlmMoeDsaForCausalLM", "glm-dsa", _glm_moe_dsa),
        Case("gemma2", "Gemma2ForCausalLM", "gemma2", _gemma2),
        Case("gemma3", "Gemma3ForCausalLM", "gemma3", _gemma3),
        Case("gemma4_moe", "Gemma4ForCausalLM", "gemma4", _gemma4_moe),
        Case("gemma4_e", "Gemma4ForCausalLM", "gemma4", _gemma4_e),
        Case("granite", "GraniteForCausalLM", "granite", _granite),
        Case("granite_moe", "GraniteMoeForCausalLM", "granitemoe", _granite_moe),
        Case(
            "granite_moe_shared", "GraniteMoeSharedForCausalLM", "granitemoe", _granite_moe_shared
        ),
        Case("granite4", "GraniteMoeHybridForCausalLM", "granite", _granite4),
        Case("granite_hybrid", "GraniteMoeHybridForCausalLM", "granitehybrid", _granite_hybrid),
        Case(
            "granite_hybrid_dense",
            "GraniteMoeHybridForCausalLM",
            "granitehybrid",
            _granite_hybrid_dense,
        ),
        Case("cohere", "CohereForCausalLM", "command-r", _cohere),
        Case("cohere2", "Cohere2ForCausalLM", "cohere2", _cohere2),
        Case("nemotron_h", "NemotronHForCausalLM", "nemotron_h", _nemotron_h),
        Case("nemotron_h_moe", "NemotronHForCausalLM", "nemotron_h_moe", _nemotron_h_moe),
        Case("nemotron_h_latent", "NemotronHForCausalLM", "nemotron_h_moe", _nemotron_h_latent),
        Case("gpt_oss", "GptOssForCausalLM", "gpt-oss", _gpt_oss),
        Case("phi3", "Phi3ForCausalLM", "phi3", _phi3),
        Case("phi3_within", "Phi3ForCausalLM", "phi3", _phi3_long(64)),
        Case("phi3_beyond", "Phi3ForCausalLM", "phi3", _phi3_long(ORIGINAL)),
        Case("ernie4_5", "Ernie4_5ForCausalLM", "ernie4_5", _ernie4_5),
        Case("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie4_5-moe", _ernie4_5_moe),
        Case("seed_oss", "SeedOssForCausalLM", "seed_oss", _headed),
        Case("smollm3", "SmolLM3ForCausalLM", "smollm3", _smollm3),
        Case("starcoder2", "Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    )
}

# Of those that have kernels for every layer, one for each thing that only some models have.
FAST = (
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "ministral3",
    "glm4_moe",
    "gemma2",
    "gemma3",
    "gemma4_moe",
    "gemma4_e",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "mistral4",
    "deepseek_v2_lite",
    "deepseek_v3",
    "phi3",
    "phi3_within",
    "phi3_beyond",
    "smollm3",
    "starcoder2",
    "ernie4_5_moe",
    "glm_moe_dsa",
    "kimi_k25",
    "gpt_oss",
    "bailing_moe_v2",
    "hunyuan_moe",
    "afmoe",
    "mimo2",
    "olmo3",
    "lfm2",
    "cohere2",
    "nemotron_h_moe",
    "nemotron_h_latent",
)

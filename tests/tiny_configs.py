"""Sizes of tiny models, and parts of their configs that many classes share.

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


def common(s: Sizes, **more) -> dict[str, Any]:
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


def headed(s: Sizes, **more) -> dict[str, Any]:
    return common(s, head_dim=s.head, **more)


def headless(s: Sizes, **more) -> dict[str, Any]:
    """For classes whose heads are as long as the width has room for: of a length that kernels
    take.
    """
    return common(s, num_attention_heads=HEADS if s is SMALL else 2, **more)


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


def experts(s: Sizes, **more) -> dict[str, Any]:
    return {
        "num_experts": s.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": s.ff_expert,
    } | more


def latent(s: Sizes, **more) -> dict[str, Any]:
    return common(s, num_key_value_heads=HEADS) | {
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

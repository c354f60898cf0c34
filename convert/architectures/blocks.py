"""Rows of a family's table that most families share: embeddings and head, attention, gated
feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from .base import Architecture
from .weight import Shape, Weight

LAYER = "model.layers.{}"


def embedding_and_head(model: Architecture) -> list[Weight]:
    """Return token embedding, last norm, and the output matrix unless it is tied to the
    embedding.
    """
    return [
        Weight("model.embed_tokens", "token_embd", (model.n_vocab, model.n_embd)),
        Weight("model.norm", "output_norm", (model.n_embd,)),
        Weight("lm_head", "output", (model.n_vocab, model.n_embd), optional=model.tied),
    ]


def attention(
    model: Architecture,
    *,
    bias: bool,
    output_bias: bool,
    rotary_pairs: bool = False,
    head_norms: bool = False,
    joined_norms: bool = False,
) -> list[Weight]:
    """Return query, key, value and output matrices. `rotary_pairs` reorders heads for GGUF's
    `llama`; `head_norms` adds the norms of queries and keys over a head, `joined_norms` those over
    all heads.
    """
    d, q, kv = model.n_embd, model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    q_heads, kv_heads = (model.n_heads, model.n_kv_heads) if rotary_pairs else (0, 0)
    norms = [
        Weight(
            f"{LAYER}.self_attn.{part}_norm",
            f"blk.{{}}.attn_{part}_norm",
            (rows if joined_norms else model.head_size,),
        )
        for part, rows in (("q", q), ("k", kv))
    ]
    return [
        Weight(
            f"{LAYER}.self_attn.q_proj", "blk.{}.attn_q", (q, d), bias=bias, rotary_heads=q_heads
        ),
        Weight(
            f"{LAYER}.self_attn.k_proj", "blk.{}.attn_k", (kv, d), bias=bias, rotary_heads=kv_heads
        ),
        Weight(f"{LAYER}.self_attn.v_proj", "blk.{}.attn_v", (kv, d), bias=bias),
        Weight(f"{LAYER}.self_attn.o_proj", "blk.{}.attn_output", (d, q), bias=output_bias),
        *(norms if head_norms or joined_norms else []),
    ]


def norms(model: Architecture) -> list[Weight]:
    """Return the norms before attention and before the feed-forward."""
    return [
        Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (model.n_embd,)),
        Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (model.n_embd,)),
    ]


def gated_feed_forward(model: Architecture, *, bias: bool = False) -> list[Weight]:
    """Return the rows of gate and up, [n_ff, n_embd], and down, [n_embd, n_ff]. bias: all may have
    one.
    """
    d, ff = model.n_embd, model.n_ff
    return [
        Weight(f"{LAYER}.mlp.gate_proj", "blk.{}.ffn_gate", (ff, d), bias=bias),
        Weight(f"{LAYER}.mlp.up_proj", "blk.{}.ffn_up", (ff, d), bias=bias),
        Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, ff), bias=bias),
    ]


def in_layers(layers: Container[int], shape: Shape) -> Callable[[int], Shape | None]:
    """Return a shape for `Weight` that only these layers have."""
    return lambda layer: shape if layer in layers else None

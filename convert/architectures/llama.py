"""Llama and what shares its tensors: plain multi-head or grouped-query attention, gated feed-forward, rotary pairs side by side."""

from __future__ import annotations

from ...formats.gguf.values import Value, u32
from . import register
from .base import Architecture, Weight


@register("LlamaForCausalLM", "MistralForCausalLM")
class Llama(Architecture):
    gguf_name = "llama"

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), "rope.dimension_count": u32(self.head_size)}

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        attention = self.config.boolean("attention_bias", default=False)
        mlp = self.config.boolean("mlp_bias", default=False)
        layer = "model.layers.{}"
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight(f"{layer}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{layer}.self_attn.q_proj", "blk.{}.attn_q", (q, d), bias=attention, rotary_heads=self.n_heads),
            Weight(f"{layer}.self_attn.k_proj", "blk.{}.attn_k", (kv, d), bias=attention, rotary_heads=self.n_kv_heads),
            Weight(f"{layer}.self_attn.v_proj", "blk.{}.attn_v", (kv, d), bias=attention),
            Weight(f"{layer}.self_attn.o_proj", "blk.{}.attn_output", (d, q), bias=attention),
            Weight(f"{layer}.post_attention_layernorm", "blk.{}.ffn_norm", (d,)),
            Weight(f"{layer}.mlp.gate_proj", "blk.{}.ffn_gate", (self.n_ff, d), bias=mlp),
            Weight(f"{layer}.mlp.up_proj", "blk.{}.ffn_up", (self.n_ff, d), bias=mlp),
            Weight(f"{layer}.mlp.down_proj", "blk.{}.ffn_down", (d, self.n_ff), bias=mlp),
            Weight("model.norm", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
        ]

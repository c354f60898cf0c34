"""Qwen3 MoE: attention with per-head norms, and routed experts in every layer."""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.gguf.values import Value, u32
from ..checkpoint import Checkpoint
from . import register
from .base import Weight
from .experts import RoutedExperts

_LAYER = "model.layers.{}"


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(RoutedExperts):
    gguf_name = "qwen3moe"

    def __init__(self, checkpoint: Checkpoint, merge_gate_up: bool = False):
        super().__init__(checkpoint, merge_gate_up)
        config = self.config
        if config.integers("mlp_only_layers", default=[]) or config.integer("decoder_sparse_step", default=1) != 1:
            raise ConfigError("layers without experts (mlp_only_layers, decoder_sparse_step) do not exist in GGUF's qwen3moe",
                              file=config.file)

    def family_keys(self) -> dict[str, Value]:
        return {"expert_feed_forward_length": u32(self.n_ff_expert)}

    def weights(self) -> list[Weight]:
        d, q, kv = self.n_embd, self.n_heads * self.head_size, self.n_kv_heads * self.head_size
        biased = self.config.boolean("attention_bias", default=False)
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight(f"{_LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{_LAYER}.self_attn.q_proj", "blk.{}.attn_q", (q, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.k_proj", "blk.{}.attn_k", (kv, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.v_proj", "blk.{}.attn_v", (kv, d), bias=biased),
            Weight(f"{_LAYER}.self_attn.o_proj", "blk.{}.attn_output", (d, q), bias=biased),
            Weight(f"{_LAYER}.self_attn.q_norm", "blk.{}.attn_q_norm", (self.head_size,)),
            Weight(f"{_LAYER}.self_attn.k_norm", "blk.{}.attn_k_norm", (self.head_size,)),
            Weight(f"{_LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,)),
            Weight(f"{_LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
            Weight("model.norm", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
        ]

"""Llama and what shares its tensors: plain multi-head or grouped-query attention, gated feed-forward, rotary pairs side by side."""

from __future__ import annotations

from ...formats.gguf.values import Value, u32
from . import register
from .base import Architecture, Weight
from .blocks import attention, embedding_and_head, gated_feed_forward, norms


@register("LlamaForCausalLM", "MistralForCausalLM")
class Llama(Architecture):
    gguf_name = "llama"

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), "rope.dimension_count": u32(self.head_size)}

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, rotary_pairs=True),
            *gated_feed_forward(self, bias=self.config.boolean("mlp_bias", default=False)),
        ]

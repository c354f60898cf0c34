"""Qwen3, dense: norms of each query and key head instead of biases."""

from __future__ import annotations

from typing import ClassVar

from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward, norms
from .registry import register
from .weight import Weight


@register("Qwen3ForCausalLM")
class Qwen3(Architecture):
    """Qwen3 without experts; GGUF `qwen3`."""

    gguf_name = "qwen3"
    window_by_default = False
    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 128}

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, head_norms=True),
            *gated_feed_forward(self),
        ]

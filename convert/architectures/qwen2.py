"""Qwen2 and Qwen2.5: Llama's layers with biases on query, key and value, and heads in the stored
order.
"""

from __future__ import annotations

from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward, norms
from .registry import register
from .weight import Weight


@register("Qwen2ForCausalLM")
class Qwen2(Architecture):
    """Qwen2 and Qwen2.5; GGUF `qwen2`."""

    gguf_name = "qwen2"
    window_by_default = False
    always_names_head_size = False

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=True, output_bias=False),
            *gated_feed_forward(self),
        ]

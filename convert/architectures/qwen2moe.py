"""Qwen1.5 MoE and Qwen2 MoE: Qwen2's attention, routed experts, and a gated shared expert."""

from __future__ import annotations

from .blocks import attention, embedding_and_head, norms
from .registry import register
from .shared_expert import GatedSharedExpert
from .weight import Weight


@register("Qwen2MoeForCausalLM")
class Qwen2Moe(GatedSharedExpert):
    """Qwen1.5 MoE and Qwen2 MoE; GGUF `qwen2moe`."""

    gguf_name = "qwen2moe"
    window_by_default = False
    renormalizes = False
    always_names_head_size = False

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=self.config.boolean("qkv_bias", default=True), output_bias=False),
            *self.expert_weights(),
        ]

"""GLM-4.5, 4.6 and 4.7: attention with biases and half of each head rotated; dense layers first,
then experts with a shared one.
"""

from __future__ import annotations

from ...formats.values import Value, boolean, f32, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head
from .experts import RoutedExperts
from .glm_tokens import GlmTokens
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .mtp import MtpBlocks
from .registry import register
from .weight import Weight


@register("Glm4MoeForCausalLM")
class Glm4Moe(GlmTokens, MtpBlocks, RoutedExperts):
    """GLM-4.5, 4.6 and 4.7; GGUF `glm4moe`."""

    gguf_name = "glm4moe"

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.n_dense = self.config.integer("first_k_dense_replace", minimum=0, maximum=self.n_main)
        self.n_shared = self.config.integer("n_shared_experts")

    def expert_layers(self) -> range:
        return range(max(self.n_dense, self.first_layer), self.n_layers)

    def expert_keys(self) -> dict[str, Value]:
        groups = self.config.integer("n_group")
        return super().expert_keys() | {
            "expert_group_count": u32(groups),
            "expert_group_used_count": u32(self.config.integer("topk_group", maximum=groups)),
        }

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        return {
            "rope.dimension_count": u32(self.rope.rotated()),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(self.n_shared),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_gating_func": u32(2),  # sigmoid, the only one of this class
            "expert_weights_scale": f32(config.number("routed_scaling_factor")),
            "expert_weights_norm": boolean(config.boolean("norm_topk_prob")),
            **self.mtp_keys(),
        }

    def weights(self) -> list[Weight]:
        d = self.n_embd
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.post_attention_norm", (d,)),
            *attention(
                self,
                bias=self.config.boolean("attention_bias", default=False),
                output_bias=False,
                head_norms=self.config.boolean("use_qk_norm", default=False),
            ),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
            *self.mtp_weights(),
        ]

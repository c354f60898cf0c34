"""DeepSeekMoE, the first DeepSeek with experts: Llama's attention, dense layers first, then experts
that the softmax of their scores chooses, next to shared ones.
"""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value, f32, string, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import DefaultRopeConfig, RopeConfig
from .blocks import attention, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import check_flag, check_name
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .registry import register
from .weight import Weight


@register("DeepseekForCausalLM")
class Deepseek(RoutedExperts):
    """DeepSeekMoE 16B; GGUF `deepseek`."""

    gguf_name = "deepseek"
    always_names_head_size = False
    renormalizes = False

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_dense = config.integer("first_k_dense_replace", minimum=0, maximum=self.n_layers)
        self.n_shared = config.integer("n_shared_experts")
        check_flag(config, self.gguf_name, "attention_bias", False)
        check_name(config, self.gguf_name, "scoring_func", ("softmax",))
        if (period := config.integer("moe_layer_freq", default=1)) != 1:
            raise ConfigError(
                f"key 'moe_layer_freq' is {period}; GGUF's {self.gguf_name} implies 1",
                file=config.file,
            )

    def make_rope(self) -> RopeConfig:
        return DefaultRopeConfig(self.config, self.head_size)

    def expert_layers(self) -> range:
        return range(self.n_dense, self.n_layers)

    def rope_keys(self) -> dict[str, Value]:
        return super().rope_keys() | {"rope.scaling.type": string("none")}

    def expert_keys(self) -> dict[str, Value]:
        keys = super().expert_keys()
        return keys | {"expert_gating_func": u32(1)} if "scoring_func" in self.config else keys

    def family_keys(self) -> dict[str, Value]:
        return {
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.head_size),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(self.n_shared),
            "expert_weights_scale": f32(1.0),
        }

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False, rotary_pairs=True),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=False),
        ]

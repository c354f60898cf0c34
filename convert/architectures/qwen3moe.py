"""Qwen3 MoE: attention with per-head norms, and routed experts in every layer."""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import RoutedExperts
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(RoutedExperts):
    """Qwen3 with experts; GGUF `qwen3moe`."""

    gguf_name = "qwen3moe"
    window_by_default = False
    renormalizes = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        if (
            config.integers("mlp_only_layers", default=[])
            or config.integer("decoder_sparse_step", default=1) != 1
        ):
            raise ConfigError(
                "layers without experts (mlp_only_layers, decoder_sparse_step) do not exist in"
                " GGUF's qwen3moe",
                file=config.file,
            )

    def family_keys(self) -> dict[str, Value]:
        return {"expert_feed_forward_length": u32(self.n_ff_expert)}

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, head_norms=True),
            Weight(f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, self.n_embd)),
        ]

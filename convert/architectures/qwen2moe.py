"""Qwen1.5 MoE and Qwen2 MoE: Qwen2's attention, routed experts, and a shared expert behind a gate of its own."""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.gguf.values import Value, u32
from ..checkpoint import Checkpoint
from ..options import Options
from . import register
from .base import Weight
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import RoutedExperts


@register("Qwen2MoeForCausalLM")
class Qwen2Moe(RoutedExperts):
    gguf_name = "qwen2moe"
    always_names_head_size = False

    def __init__(self, checkpoint: Checkpoint, options: Options = Options()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_ff_shared = config.integer("shared_expert_intermediate_size")
        if config.integers("mlp_only_layers", default=[]) or config.integer("decoder_sparse_step", default=1) != 1:
            raise ConfigError("layers without experts (mlp_only_layers, decoder_sparse_step) do not exist in GGUF's qwen2moe",
                              file=config.file)

    def family_keys(self) -> dict[str, Value]:
        return {"expert_feed_forward_length": u32(self.n_ff_expert), "expert_shared_feed_forward_length": u32(self.n_ff_shared)}

    def weights(self) -> list[Weight]:
        d, shared = self.n_embd, self.n_ff_shared
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=self.config.boolean("qkv_bias", default=True), output_bias=False),
            Weight(f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
            Weight(f"{LAYER}.mlp.shared_expert_gate", "blk.{}.ffn_gate_inp_shexp", (1, d)),
            Weight(f"{LAYER}.mlp.shared_expert.gate_proj", "blk.{}.ffn_gate_shexp", (shared, d)),
            Weight(f"{LAYER}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp", (shared, d)),
            Weight(f"{LAYER}.mlp.shared_expert.down_proj", "blk.{}.ffn_down_shexp", (d, shared)),
        ]

"""Routed experts in every layer and a shared expert with a gate, as in Qwen's models."""

from __future__ import annotations

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from .blocks import LAYER
from .experts import RoutedExperts
from .layout_options import LayoutOptions
from .weight import Weight


class GatedSharedExpert(RoutedExperts):
    """Base of families with routed experts and a gated shared expert in every layer."""

    ff_is_optional = True

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.n_ff_shared = self.config.integer("shared_expert_intermediate_size")
        if (
            self.config.integers("mlp_only_layers", default=[])
            or self.config.integer("decoder_sparse_step", default=1) != 1
        ):
            raise ConfigError(
                "layers without experts (mlp_only_layers, decoder_sparse_step) do not exist in"
                " GGUF's form of this model",
                file=self.config.file,
            )

    def family_keys(self) -> dict[str, Value]:
        return {
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_feed_forward_length": u32(self.n_ff_shared),
        }

    def expert_weights(self) -> list[Weight]:
        """Return the rows of router [n_experts, n_embd], shared expert and its gate [1, n_embd]."""
        d, ff = self.n_embd, self.n_ff_shared
        return [
            Weight(f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", (self.n_experts, d)),
            Weight(f"{LAYER}.mlp.shared_expert.gate_proj", "blk.{}.ffn_gate_shexp", (ff, d)),
            Weight(f"{LAYER}.mlp.shared_expert.up_proj", "blk.{}.ffn_up_shexp", (ff, d)),
            Weight(f"{LAYER}.mlp.shared_expert.down_proj", "blk.{}.ffn_down_shexp", (d, ff)),
            Weight(f"{LAYER}.mlp.shared_expert_gate", "blk.{}.ffn_gate_inp_shexp", (1, d)),
        ]

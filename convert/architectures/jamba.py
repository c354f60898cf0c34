"""Jamba: the first Mamba in most layers, attention without rotations in others; experts in some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, ValueType, array, f32, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .blocks import LAYER, attention, in_layers
from .experts import RoutedExperts
from .implied import check_flag
from .layout_options import LayoutOptions
from .leading_dense import gated_rows
from .mamba1 import Mamba1
from .registry import register
from .weight import ConvertedTensor, Shape, Weight

_MIXER = f"{LAYER}.mamba"
_FORWARD = f"{LAYER}.feed_forward"


@register("JambaForCausalLM")
class Jamba(RoutedExperts):
    """Jamba without and with experts; GGUF `jamba`."""

    gguf_name = "jamba"
    expert_stem = f"{_FORWARD}.experts"
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        self.attending = self._every("attn_layer")
        self.sparse = self._every("expert_layer") if self.n_experts > 1 else []
        self.has_experts = bool(self.sparse)
        inner = config.integer("mamba_expand") * self.n_embd
        self.mamba = Mamba1.read(_MIXER, config, name, inner, "mamba_")
        check_flag(config, name, "mamba_proj_bias", False)
        check_flag(config, name, "mamba_conv_bias", True)
        if self.head_size * self.n_heads != self.n_embd:
            raise ConfigError(
                f"{self.n_heads} heads of {self.head_size} elements are not hidden_size"
                f" {self.n_embd}, which GGUF's {name} implies",
                file=config.file,
            )

    def _every(self, key: str) -> list[int]:
        """Return the layers that are so many, `<key>_period`, from one another, from
        `<key>_offset` on. Raise ConfigError for an offset that is no smaller.
        """
        period = self.config.integer(f"{key}_period")
        offset = self.config.integer(f"{key}_offset", minimum=0, maximum=period - 1)
        return [*range(offset, self.n_layers, period)]

    def read_expert_sizes(self) -> None:
        self.n_experts = self.config.integer("num_experts", "num_local_experts")
        self.n_experts_used = 1
        if self.n_experts > 1:  # one expert is a dense layer
            most = self.n_experts
            self.n_experts_used = self.config.integer("num_experts_per_tok", maximum=most)
        self.n_ff_expert = self.n_ff or 0

    def expert_layers(self) -> list[int]:
        return self.sparse

    def metadata(self) -> dict[str, Value]:
        """Return the keys `jamba.*` in the order of the reference."""
        config = self.config
        heads = [
            self.n_kv_heads if layer in self.attending else 0 for layer in range(self.n_layers)
        ]
        keys = {
            "block_count": u32(self.n_layers),
            "context_length": u32(config.integer("max_position_embeddings")),
            "embedding_length": u32(self.n_embd),
            "feed_forward_length": u32(self.n_ff_expert),
            "attention.head_count": u32(self.n_heads),
            "attention.head_count_kv": array(ValueType.INT32, heads),
            **self.mamba.keys,
            "attention.layer_norm_rms_epsilon": f32(config.number("rms_norm_eps")),
            "expert_count": u32(self.n_experts),
            "expert_used_count": u32(self.n_experts_used),
        }
        own = {f"{self.gguf_name}.{key}": value for key, value in keys.items()}
        return {**own, "general.file_type": u32(0)}

    def weights(self) -> list[Weight]:
        d, n_layers = self.n_embd, range(self.n_layers)
        recurrent = {*n_layers} - {*self.attending}
        dense = {*n_layers} - {*self.sparse}

        def of(layers) -> Callable[[Shape], Callable[[int], Shape | None]]:
            return lambda shape: in_layers(layers, shape)

        chosen = {"dt": self.mamba.rank, "b": self.mamba.state, "c": self.mamba.state}
        attending = [
            replace(row, shape=in_layers(self.attending, row.shape))
            for row in attention(self, bias=False, output_bias=False)
            if not callable(row.shape)
        ]
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.final_layernorm", "output_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.pre_ff_layernorm", "blk.{}.ffn_norm", (d,)),
            *attending,
            *self.mamba.weights(d, of(recurrent)),
            *(
                Weight(
                    f"{_MIXER}.{part}_layernorm", f"blk.{{}}.ssm_{part}_norm", of(recurrent)((n,))
                )
                for part, n in chosen.items()
            ),
            *gated_rows(_FORWARD, "blk.{{}}.ffn_{}", d, self.n_ff_expert, dense),
            Weight(
                f"{_FORWARD}.router",
                "blk.{}.ffn_gate_inp",
                in_layers(self.sparse, (self.n_experts, d)),
            ),
        ]

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        return self.mamba.shaped(self.checkpoint, tensor, weight, suffix, made)

"""ERNIE 4.5 with experts: dense layers first, then routed experts, chosen with a bias, and shared
ones that are stored as one.

Blocks that predict further tokens are dropped: GGUF's ernie4_5-moe has no tensors for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError
from ...formats.values import Value, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .blocks import LAYER, attention, embedding_and_head, in_layers, norms
from .experts import RoutedExperts
from .implied import check_flag, check_number
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Weight

_CHOICE_BIAS = "mlp.moe_statics.e_score_correction_bias"


@register("Ernie4_5_MoeForCausalLM")
class Ernie45Moe(RoutedExperts):
    """ERNIE 4.5 with experts; GGUF `ernie4_5-moe`."""

    gguf_name = "ernie4_5-moe"
    tied_by_default = True
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_dense = config.integer("moe_layer_start_index", minimum=0, maximum=self.n_layers)
        self.interval = config.integer("moe_layer_interval")
        self.n_shared = config.integer("moe_num_shared_experts", minimum=0)
        last = config.integer("moe_layer_end_index", minimum=-1, default=-1)
        if last != -1 and last < self.n_layers - 1:
            raise ConfigError(
                f"key 'moe_layer_end_index' is {last}; GGUF's {self.gguf_name} has no dense layers"
                " after those with experts",
                file=config.file,
            )

    def read_expert_sizes(self) -> None:
        config = self.config
        self.n_experts = config.integer("moe_num_experts", "num_experts")
        self.n_experts_used = config.integer("moe_k", "num_experts_per_tok", maximum=self.n_experts)
        self.n_ff_expert = self.expert_width()

    def expert_layers(self) -> range:
        first = self.n_dense + -(self.n_dense + 1) % self.interval
        return range(first, self.n_layers, self.interval)

    def family_keys(self) -> dict[str, Value]:
        config, name = self.config, self.gguf_name
        check_flag(config, name, "use_bias", False)  # runtimes read no biases in the feed-forward
        check_number(config, name, "moe_norm_min", 1e-12)
        keys = {
            "interleave_moe_layer_step": u32(self.interval),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "expert_shared_count": u32(self.n_shared),
        }
        if self.n_shared:
            # The reference divides intermediate_size by num_key_value_heads, which is the same
            # number for the published models, but not the width of the tensors of all others.
            keys["expert_shared_feed_forward_length"] = u32(self.n_shared * self.n_ff_expert)
        return keys

    def text_name(self, name: str) -> str | None:
        return None if name.startswith("model.mtp_") else super().text_name(name)

    def weights(self) -> list[Weight]:
        d, sparse = self.n_embd, self.expert_layers()
        shared = self.n_shared * self.n_ff_expert

        def matrices(stored: str, gguf: str, width: int, has_experts: bool) -> list[Weight]:
            return [
                Weight(
                    f"{LAYER}.{stored}.{part}_proj",
                    f"blk.{{}}.ffn_{part}{gguf}",
                    lambda layer, shape=shape: shape if (layer in sparse) == has_experts else None,
                )
                for part, shape in (("gate", (width, d)), ("up", (width, d)), ("down", (d, width)))
            ]

        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=False, output_bias=False),
            *matrices("mlp", "", self.n_ff, False),
            Weight(
                f"{LAYER}.mlp.gate", "blk.{}.ffn_gate_inp", in_layers(sparse, (self.n_experts, d))
            ),
            Weight(
                f"{LAYER}.{_CHOICE_BIAS}",
                "blk.{}.exp_probs_b.bias",
                in_layers(sparse, (self.n_experts,)),
                exact=True,
            ),
            *(matrices("mlp.shared_experts", "_shexp", shared, True) if shared else ()),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if name.endswith(_CHOICE_BIAS) and tensor.shape[:1] == (1,):  # stored as [1, n_experts]
            strides = tensor.strides and tensor.strides[1:]
            tensor = replace(tensor, shape=tensor.shape[1:], strides=strides)
        yield from super().convert(name, tensor, table)

"""Gated delta net layers with gated attention in every n-th layer and an MTP block in `mtp.*`, as
in Qwen3-Next and Qwen3.5.

Norms, except those inside the delta net, are stored minus 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import ComputedRows, SelectedColumns
from ..tensors.stored import StoredTensor
from .blocks import LAYER
from .layout_options import LayoutOptions
from .mtp import MtpBlocks, name_in_layers
from .weight import ConvertedTensor, Shape, Weight

DELTA = f"{LAYER}.linear_attn"
_MAX_LAYERS = 1 << 16  # because each layer has an entry in the metadata


class DeltaNet(MtpBlocks):
    """Sizes: `n_k` key and `n_v` value heads of `k_size` and `v_size`; the convolution runs over
    all channels of q, k and v.

    `value_heads` is the order of the stored value heads in the GGUF file.
    """

    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 256}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        self.k_size, self.v_size = (
            config.integer("linear_key_head_dim"),
            config.integer("linear_value_head_dim"),
        )
        self.n_k, self.n_v = (
            config.integer("linear_num_key_heads"),
            config.integer("linear_num_value_heads"),
        )
        if self.n_v % self.n_k:
            raise ConfigError(
                f"linear_num_value_heads {self.n_v} is not a multiple of linear_num_key_heads"
                f" {self.n_k}",
                file=config.file,
            )
        if not config.boolean("attn_output_gate", default=True):
            raise ConfigError(
                "key 'attn_output_gate' is false; GGUF's form of this model has gated attention",
                file=config.file,
            )
        self.n_conv = config.integer("linear_conv_kernel_dim")
        self.interval = (
            config.integer("full_attention_interval", default=None) or self._interval_of_types()
        )
        self.value_heads = np.arange(self.n_v)

    def _interval_of_types(self) -> int:
        """Return the interval that `layer_types` implies; by default 4, as the model classes do."""
        kinds = self.config.strings("layer_types", default=[])
        return kinds.index("full_attention") + 1 if "full_attention" in kinds else 4

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has a gated delta net and not attention."""
        return layer < self.n_main and (layer + 1) % self.interval != 0

    def recurrent(self, shape: Shape) -> Callable[[int], Shape | None]:
        """Return the shape per layer of a weight that only recurrent layers have."""
        return lambda layer: shape if self.is_recurrent(layer) else None

    def attending(self, shape: Shape) -> Callable[[int], Shape | None]:
        """Return the shape per layer of a weight that only layers with attention have."""
        return lambda layer: None if self.is_recurrent(layer) else shape

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.n_k * self.k_size + self.n_v * self.v_size

    # --- metadata

    def family_keys(self) -> dict[str, Value]:
        kinds = self.config.strings("layer_types", default=[])
        recurrent = [self.is_recurrent(layer) for layer in range(self.n_layers)]
        wanted = [
            "linear_attention" if delta else "full_attention" for delta in recurrent[: self.n_main]
        ]
        if kinds and kinds != wanted:
            raise ConfigError(
                f"key 'layer_types' does not have full attention in every {self.interval}. layer,"
                " and in no other; GGUF's form of this model does",
                file=self.config.file,
            )
        return {
            **super().family_keys(),
            **self.mtp_keys(),
            "ssm.conv_kernel": u32(self.n_conv),
            "ssm.state_size": u32(self.k_size),
            "ssm.group_count": u32(self.n_k),
            "ssm.time_step_rank": u32(self.n_v),
            "ssm.inner_size": u32(self.n_v * self.v_size),
            "attention.recurrent_layers": array(ValueType.BOOL, recurrent),
            "full_attention_interval": u32(self.interval),
            "rope.dimension_count": u32(self.rope.rotated()),
        }

    # --- tensors

    def further_name(self, name: str) -> str:
        return name_in_layers(name, self.n_main)

    def weights(self) -> list[Weight]:
        d, hd, q, kv = (
            self.n_embd,
            self.head_size,
            self.n_heads * self.head_size,
            self.n_kv_heads * self.head_size,
        )
        attn = f"{LAYER}.self_attn"
        biased = self.config.boolean("attention_bias", default=False)
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.norm", "output_norm", (d,), plus_one=True),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), plus_one=True),
            Weight(
                f"{LAYER}.post_attention_layernorm",
                "blk.{}.post_attention_norm",
                (d,),
                plus_one=True,
            ),
            # Per head the query, then its gate.
            Weight(f"{attn}.q_proj", "blk.{}.attn_q", self.attending((2 * q, d)), bias=biased),
            Weight(f"{attn}.k_proj", "blk.{}.attn_k", self.attending((kv, d)), bias=biased),
            Weight(f"{attn}.v_proj", "blk.{}.attn_v", self.attending((kv, d)), bias=biased),
            Weight(f"{attn}.o_proj", "blk.{}.attn_output", self.attending((d, q)), bias=biased),
            Weight(f"{attn}.q_norm", "blk.{}.attn_q_norm", self.attending((hd,)), plus_one=True),
            Weight(f"{attn}.k_norm", "blk.{}.attn_k_norm", self.attending((hd,)), plus_one=True),
            Weight(f"{DELTA}.A_log", "blk.{}.ssm_a", self.recurrent((self.n_v,)), exact=True),
            Weight(
                f"{DELTA}.dt_bias", "blk.{}.ssm_dt.bias", self.recurrent((self.n_v,)), exact=True
            ),
            Weight(
                f"{DELTA}.conv1d",
                "blk.{}.ssm_conv1d",
                self.recurrent((self.n_channels, 1, self.n_conv)),
            ),
            Weight(f"{DELTA}.norm", "blk.{}.ssm_norm", self.recurrent((self.v_size,))),
            Weight(
                f"{DELTA}.out_proj", "blk.{}.ssm_out", self.recurrent((d, self.n_v * self.v_size))
            ),
            *self.mtp_weights(plus_one=True),
        ]

    def value_rows(self, size: int) -> np.ndarray:
        """Return the rows of the stored value heads, `size` each, in the order of the GGUF file."""
        return (self.value_heads[:, None] * size + np.arange(size)).ravel()

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        info, rows = made.info, made.rows
        if weight.stored == f"{DELTA}.conv1d":
            return ConvertedTensor(
                TensorInfo(info.name, (self.n_channels, self.n_conv), info.type), rows
            )
        if weight.stored in (f"{DELTA}.A_log", f"{DELTA}.dt_bias"):
            rows = SelectedColumns(rows, self.value_heads, info.type)
        # In double precision, so that the last bit is that of the exact value.
        if weight.stored == f"{DELTA}.A_log":
            negative = ComputedRows(
                rows, info.type, self.n_v, lambda x: -np.exp(x.astype(np.float64))
            )
            return ConvertedTensor(info.with_type(TYPES["F32"]), negative)
        return replace(made, rows=rows)

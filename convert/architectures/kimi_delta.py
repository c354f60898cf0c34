"""What models with Kimi delta attention (KDA), a delta net whose decay is per channel, in most
layers and latent attention in the others have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ...errors import ConfigError, printable
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import ComputedRows
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER
from .implied import GLOBAL
from .latent import LatentAttention
from .layout_options import LayoutOptions
from .weight import ConvertedTensor, Shape, Weight, check_shape

LINEAR = "linear_attention"
ATTN = f"{LAYER}.self_attn"
_MAX_LAYERS = 1 << 16  # because each layer has an entry in the metadata


class KimiDeltaLayers(LatentAttention):
    """`kinds`: `linear_attention` or `full_attention` of each layer. Heads of KDA, as many as those
    of latent attention, have `n_linear` elements; its convolutions have `n_taps` taps.
    """

    low_rank = True  # decays and gates come from two products, through a shorter vector
    rate_sign = -1  # of `ssm_a`, whose logarithm is stored

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        self.kinds = self.layer_kinds()
        self.n_linear = self.config.integer("linear_head_dim", default=128)
        self.n_taps = self.config.integer(
            "linear_conv_kernel_dim", default=4, minimum=2, maximum=64
        )
        heads = self.config.integer("linear_num_heads", default=self.n_heads)
        if heads != self.n_heads:
            raise ConfigError(
                f"layers with linear attention have {heads} heads, and others {self.n_heads};"
                f" GGUF's {self.gguf_name} has one number for both",
                file=self.config.file,
            )

    @property
    def rate_shape(self) -> Shape:
        """The shape of `ssm_a` in GGUF."""
        return (self.n_heads,)

    def layer_kinds(self) -> list[str]:
        """Return the kind of each layer. Raise ConfigError for other kinds."""
        return self.checked_kinds(self.config.strings("layer_types", default=[]), self.n_layers)

    def checked_kinds(self, kinds: list[str], n_layers: int) -> list[str]:
        """Return `kinds`, those of n_layers layers. Raise ConfigError for other kinds, or another
        number of them.
        """
        other = next((kind for kind in kinds if kind not in (GLOBAL, LINEAR)), None)
        if len(kinds) != n_layers or other is not None:
            raise ConfigError(
                f"key 'layer_types' has {len(kinds)} items"
                + (f", one of them '{printable(other)}'" if other is not None else "")
                + f"; expected {n_layers} times {LINEAR} or {GLOBAL}",
                file=self.config.file,
            )
        return kinds

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        heads = [self.n_kv_heads if kind == GLOBAL else 0 for kind in self.kinds]
        key = f"{self.gguf_name}.attention.head_count_kv"
        return super().metadata() | {key: array(ValueType.INT32, heads)}

    def delta_keys(self) -> dict[str, Value]:
        """Return the keys of KDA."""
        return {"ssm.conv_kernel": u32(self.n_taps), "kda.head_dim": u32(self.n_linear)}

    # --- tensors

    def in_kind(self, kind: str, shape: Shape) -> Callable[[int], Shape | None]:
        """Return a shape that only layers of this kind have."""
        return lambda layer: shape if self.kinds[layer] == kind else None

    def mixers(self) -> list[Weight]:
        """Return the rows of both kinds of attention."""
        d, n = self.n_embd, self.n_linear
        inner = self.n_heads * n
        if self.low_rank:
            of_rates = [
                row
                for part in "fg"
                for row in (
                    (f"{part}_a_proj", f"ssm_{part}_a", (n, d)),
                    (f"{part}_b_proj", f"ssm_{part}_b", (inner, n)),
                )
            ]
        else:
            of_rates = [(f"{part}_proj", f"ssm_{part}_a", (inner, d)) for part in "fg"]
        linear: list[tuple[str, str, Shape]] = [
            ("k_proj", "attn_k", (inner, d)),
            ("v_proj", "attn_v", (inner, d)),
            *of_rates,
            ("b_proj", "ssm_beta", (self.n_heads, d)),
            ("o_norm", "ssm_norm", (n,)),
            *((f"{x}_conv1d", f"ssm_conv1d_{x}", (inner, self.n_taps)) for x in "qkv"),
        ]
        # Both kinds of layers have these; queries of latent vectors have other names.
        query = None if self.q_rank else (self.n_heads * (self.n_nope + self.n_rot), d)
        both: list[tuple[str, str, Shape, Shape | None]] = [
            ("q_proj", "attn_q", (inner, d), query),
            ("o_proj", "attn_output", (d, inner), (d, self.n_heads * self.n_value)),
        ]

        def either(first: Shape, second: Shape | None) -> Callable[[int], Shape | None]:
            return lambda layer: first if self.kinds[layer] == LINEAR else second

        of_latent = [
            replace(weight, shape=self.in_kind(GLOBAL, weight.shape))
            for weight in self.attention()
            if not weight.stored.endswith((".q_proj", ".o_proj")) and not callable(weight.shape)
        ]
        return [
            *of_latent,
            *(
                Weight(f"{ATTN}.{stored}", f"blk.{{}}.{gguf}", either(first, second))
                for stored, gguf, first, second in both
            ),
            *(
                Weight(f"{ATTN}.{stored}", f"blk.{{}}.{gguf}", self.in_kind(LINEAR, shape))
                for stored, gguf, shape in linear
            ),
            Weight(
                f"{ATTN}.dt_bias", "blk.{}.ssm_dt.bias", self.in_kind(LINEAR, (inner,)), exact=True
            ),
            Weight(
                f"{ATTN}.A_log",
                "blk.{}.ssm_a",
                self.in_kind(LINEAR, (self.n_heads,)),
                exact=True,
            ),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if name.endswith("_conv1d.weight") and len(tensor.shape) == 3:
            check_shape(tensor, (self.n_heads * self.n_linear, 1, self.n_taps))
            strides = tensor.strides and (tensor.strides[0], tensor.strides[2])
            tensor = replace(tensor, shape=tensor.shape[::2], strides=strides)
        if name.endswith(".A_log") and len(tensor.shape) == 4:
            check_shape(tensor, (1, 1, self.n_heads, 1))
            strides = tensor.strides and (tensor.strides[2],)
            tensor = replace(tensor, shape=tensor.shape[2:3], strides=strides)
        yield from super().convert(name, tensor, table)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if weight.stored.endswith("_conv1d"):
            rows, taps = made.info.shape
            info = TensorInfo(made.info.name, (1, rows, 1, taps), made.info.type)
            return ConvertedTensor(info, made.rows)
        if weight.stored == f"{ATTN}.A_log":  # in double precision, as of other delta nets
            n_rows = self.n_heads // self.rate_shape[-1]
            rows = StoredRows(self.checkpoint, tensor, n_rows)
            computed = ComputedRows(
                rows,
                made.info.type,
                self.rate_shape[-1],
                lambda x: self.rate_sign * np.exp(x.astype(np.float64)),
            )
            info = TensorInfo(made.info.name, self.rate_shape, TYPES["F32"])
            return ConvertedTensor(info, computed)
        return made

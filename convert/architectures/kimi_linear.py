"""Kimi Linear: Kimi delta attention (KDA), whose decay is per channel, in most layers, and latent
attention without rotation in the others; experts after the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ...errors import ConfigError, printable
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, ValueType, array, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.reorder import ComputedRows
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER, embedding_and_head, norms
from .experts import DOWN, GATE, UP
from .implied import GLOBAL, check_flag, check_name
from .latent import LatentAttention
from .layout_options import LayoutOptions
from .leading_dense import dense_then_experts
from .registry import register
from .weight import ConvertedTensor, Shape, Weight, check_shape

_LINEAR = "linear_attention"
_ATTN = f"{LAYER}.self_attn"
# What published configs say in other words than classes with experts and latent attention do.
_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "moe_router_activation_func": "scoring_func",
}


@register("KimiLinearForCausalLM")
class KimiLinear(LatentAttention):
    """Kimi-Linear-48B-A3B; GGUF `kimi-linear`."""

    gguf_name = "kimi-linear"
    default_scoring = "sigmoid"
    has_selection_bias = True
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w3": UP, "w2": DOWN}
    class_defaults: ClassVar[dict[str, object]] = {
        "max_position_embeddings": 1 << 20,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.kinds = self._layer_kinds()
        self.n_linear = config.integer("linear_head_dim", default=128)
        self.n_taps = config.integer("linear_conv_kernel_dim", default=4, minimum=2, maximum=64)
        heads = config.integer("linear_num_heads", default=self.n_heads)
        if heads != self.n_heads:
            raise ConfigError(
                f"layers with linear attention have {heads} heads, and others {self.n_heads};"
                f" GGUF's {self.gguf_name} has one number for both",
                file=config.file,
            )
        check_flag(config, self.gguf_name, "mla_use_nope", True)
        for key in ("moe_renormalize", "norm_topk_prob"):  # either, the name that a file has first
            check_flag(config, self.gguf_name, key, True)
        for key in ("moe_router_activation_func", "scoring_func"):
            check_name(config, self.gguf_name, key, ("sigmoid",))
        if config.integer("n_group", default=1) != 1:
            raise ConfigError(
                f"key 'num_expert_group' is not 1; GGUF's {self.gguf_name} has one group of"
                " experts",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = checkpoint.config.of_text()
        found: dict[str, Any] = {
            new: config.values[old] for old, new in _NAMES.items() if old in config
        }
        if (linear := config.section("linear_attn_config")) is not None:
            found |= {
                f"linear_{new}": linear.integer(old)
                for old, new in (
                    ("head_dim", "head_dim"),
                    ("num_heads", "num_heads"),
                    ("short_conv_kernel_size", "conv_kernel_dim"),
                )
                if old in linear
            }
        # `head_dim` of these configs is the size of no head.
        others = {key: value for key, value in config.values.items() if key != "head_dim"}
        return Config({**others, **found}, config.file).with_defaults(self.class_defaults)

    def _layer_kinds(self) -> list[str]:
        """Return `linear_attention` or `full_attention` for each layer. Raise ConfigError for other
        kinds, and for layers of no kind or of both.
        """
        config, kinds = self.config, self.config.strings("layer_types", default=[])
        if (linear := config.section("linear_attn_config")) is not None:
            full, kda = (set(linear.integers(key)) for key in ("full_attn_layers", "kda_layers"))
            both, n = full | kda, self.n_layers
            if full & kda or len(both) != n or min(both) < 1 or max(both) > n:
                raise ConfigError(
                    "keys 'full_attn_layers' and 'kda_layers' of 'linear_attn_config' do not name"
                    f" each of {n} layers once",
                    file=config.file,
                )
            kinds = [GLOBAL if layer + 1 in full else _LINEAR for layer in range(self.n_layers)]
        other = next((kind for kind in kinds if kind not in (GLOBAL, _LINEAR)), None)
        if len(kinds) != self.n_layers or other is not None:
            raise ConfigError(
                f"key 'layer_types' has {len(kinds)} items"
                + (f", one of them '{printable(other)}'" if other is not None else "")
                + f"; expected {self.n_layers} times {_LINEAR} or {GLOBAL}",
                file=config.file,
            )
        return kinds

    # --- metadata

    def metadata(self) -> dict[str, Value]:
        heads = [self.n_kv_heads if kind == GLOBAL else 0 for kind in self.kinds]
        key = f"{self.gguf_name}.attention.head_count_kv"
        return super().metadata() | {key: array(ValueType.INT32, heads)}

    def head_size_keys(self) -> dict[str, Value]:
        keys = {"attention.key_length": u32(self.kv_rank + self.n_rot)}
        if (size := self.checkpoint.config.of_text().integer("head_dim", default=None)) is not None:
            keys["attention.value_length"] = u32(size)  # as the reference, though no head has it
        return keys

    def expert_keys(self) -> dict[str, Value]:
        keys = super().expert_keys()
        keys.pop("expert_group_count", None)  # one
        return keys

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        keys.pop("expert_weights_norm", None)  # runtimes always norm them
        return keys | {"ssm.conv_kernel": u32(self.n_taps), "kda.head_dim": u32(self.n_linear)}

    # --- tensors

    def text_name(self, name: str) -> str | None:
        found = super().text_name(name)
        return None if found is None else found.replace(".block_sparse_moe.", ".mlp.", 1)

    def _in(self, kind: str, shape: Shape) -> Callable[[int], Shape | None]:
        """Return a shape that only layers of this kind have."""
        return lambda layer: shape if self.kinds[layer] == kind else None

    def weights(self) -> list[Weight]:
        d, n = self.n_embd, self.n_linear
        inner = self.n_heads * n
        linear: list[tuple[str, str, Shape]] = [
            ("k_proj", "attn_k", (inner, d)),
            ("v_proj", "attn_v", (inner, d)),
            ("f_a_proj", "ssm_f_a", (n, d)),
            ("f_b_proj", "ssm_f_b", (inner, n)),
            ("b_proj", "ssm_beta", (self.n_heads, d)),
            ("g_a_proj", "ssm_g_a", (n, d)),
            ("g_b_proj", "ssm_g_b", (inner, n)),
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
            return lambda layer: first if self.kinds[layer] == _LINEAR else second

        of_latent = [
            replace(weight, shape=self._in(GLOBAL, weight.shape))
            for weight in self.attention()
            if not weight.stored.endswith((".q_proj", ".o_proj")) and not callable(weight.shape)
        ]
        return [
            *embedding_and_head(self),
            *norms(self),
            *of_latent,
            *(
                Weight(f"{_ATTN}.{stored}", f"blk.{{}}.{gguf}", either(first, second))
                for stored, gguf, first, second in both
            ),
            *(
                Weight(f"{_ATTN}.{stored}", f"blk.{{}}.{gguf}", self._in(_LINEAR, shape))
                for stored, gguf, shape in linear
            ),
            Weight(
                f"{_ATTN}.dt_bias", "blk.{}.ssm_dt.bias", self._in(_LINEAR, (inner,)), exact=True
            ),
            Weight(
                f"{_ATTN}.A_log",
                "blk.{}.ssm_a",
                self._in(_LINEAR, (1, 1, self.n_heads, 1)),
                exact=True,
            ),
            *dense_then_experts(self, self.n_dense, self.n_shared, choice_bias=True),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if name.endswith("_conv1d.weight") and len(tensor.shape) == 3:
            check_shape(tensor, (self.n_heads * self.n_linear, 1, self.n_taps))
            strides = tensor.strides and (tensor.strides[0], tensor.strides[2])
            tensor = replace(tensor, shape=tensor.shape[::2], strides=strides)
        yield from super().convert(name, tensor, table)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if weight.stored.endswith("_conv1d"):
            rows, taps = made.info.shape
            info = TensorInfo(made.info.name, (1, rows, 1, taps), made.info.type)
            return ConvertedTensor(info, made.rows)
        if weight.stored == f"{_ATTN}.A_log":  # in double precision, as of other delta nets
            rows = StoredRows(self.checkpoint, tensor, self.n_heads)
            computed = ComputedRows(
                rows, made.info.type, 1, lambda x: -np.exp(x.astype(np.float64))
            )
            return ConvertedTensor(made.info.with_type(TYPES["F32"]), computed)
        return made

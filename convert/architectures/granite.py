"""Granite 3 and 4: Llama with factors of embeddings, of what layers add, of scores and of logits;
with experts, a router whose experts are stacked, and a shared one in some models; with Mamba-2 in
most layers of some models of Granite 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.source import TensorInfo
from ...formats.values import Value, ValueType, array, boolean, f32, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import RowRange, StoredRows
from ..tensors.stored import StoredTensor
from .blocks import LAYER, attention, embedding_and_head, norms
from .experts import RoutedExperts
from .implied import check_flag
from .layout_options import LayoutOptions
from .llama import Llama
from .mamba2 import Mamba2
from .registry import register
from .weight import ConvertedTensor, Shape, Weight, check_shape, split_numbers

_FACTORS = (
    ("attention.scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
)
_MOE = f"{LAYER}.block_sparse_moe"
_SHARED = f"{LAYER}.shared_mlp"
_ATTENDING, _RECURRENT = ("attention", "full_attention"), ("mamba", "linear_attention")
_MAX_LAYERS = 1 << 16  # because each layer has an entry in the metadata


@register("GraniteForCausalLM")
class Granite(Llama):
    """Granite without experts; GGUF `granite`."""

    gguf_name = "granite"
    pre_names: ClassVar[dict[str, str]] = {"starcoder": "refact", "glm4": "dbrx"}
    class_defaults: ClassVar[dict[str, object]] = {
        "rms_norm_eps": 1e-6,
        **{stored: 1.0 for _, stored in _FACTORS},
    }

    def head_size_keys(self) -> dict[str, Value]:
        # The reference does not know `head_dim` of this class, so it names none.
        usual = self.head_size * self.n_heads == self.n_embd
        return {} if usual else super().head_size_keys()

    def family_keys(self) -> dict[str, Value]:
        factors = {key: f32(self.config.number(stored)) for key, stored in _FACTORS}
        return super().family_keys() | factors


@register("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
class GraniteMoe(RoutedExperts, Granite):
    """Granite with experts, and with a shared one where `shared_intermediate_size` says so; GGUF
    `granitemoe`.
    """

    gguf_name = "granitemoe"
    expert_stem = f"{_MOE}.experts"
    shared_by_default = 0
    router = "router.layer"
    joins_shared = False  # gate and up of the shared expert stay one tensor

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        self.n_ff_shared = self.config.integer(
            "shared_intermediate_size", minimum=0, default=self.shared_by_default
        )

    def expert_width(self) -> int:
        return self.n_ff

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        if self.n_experts and self.n_ff_shared:
            keys["expert_shared_feed_forward_length"] = u32(self.n_ff_shared)
        return keys

    def weights(self) -> list[Weight]:
        biased, d = self.config.boolean("attention_bias", default=False), self.n_embd
        table = [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, rotary_pairs=True),
        ]
        if self.n_experts:
            router = f"{_MOE}.{self.router}"
            table.append(Weight(router, "blk.{}.ffn_gate_inp", (self.n_experts, d)))
        if ff := self.n_ff_shared:
            first = "up" if self.joins_shared else "gate"
            gate, down = (f"blk.{{}}.ffn_{part}{self._suffix}" for part in (first, "down"))
            table += [
                # `convert` divides it, unless gate and up are joined.
                Weight(f"{_SHARED}.input_linear", gate, (2 * ff, d)),
                Weight(f"{_SHARED}.output_linear", down, (d, ff)),
            ]
        return table

    @property
    def _divides_shared(self) -> bool:
        return self.n_ff_shared > 0 and not self.joins_shared

    @property
    def _suffix(self) -> str:
        """What follows the names of matrices that work on every token."""
        return "_shexp" if self.n_experts else ""

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        pattern, numbers = split_numbers(name)
        if self.n_experts and pattern == f"{_MOE}.input_linear.weight":
            yield from self.stack(self.layer_of(tensor, numbers)).stacked_gate_up(tensor)
        elif self.n_experts and pattern == f"{_MOE}.output_linear.weight":
            yield from self.stack(self.layer_of(tensor, numbers)).stacked_down(tensor)
        elif self._divides_shared and pattern == f"{_SHARED}.input_linear.weight":
            yield from self._gate_and_up(tensor, self.layer_of(tensor, numbers))
        else:
            yield from super().convert(name, tensor, table)

    def _gate_and_up(self, tensor: StoredTensor, layer: int) -> Iterator[ConvertedTensor]:
        """Yield both halves of [2 n_ff, n_embd], gate rows first."""
        ff, d = self.n_ff_shared, self.n_embd
        check_shape(tensor, (2 * ff, d))
        whole, type = StoredRows(self.checkpoint, tensor), self.checkpoint.type_of(tensor)
        for half, part in enumerate(("gate", "up")):
            gguf = f"blk.{layer}.ffn_{part}{self._suffix}.weight"
            info = TensorInfo(gguf, (ff, d), type)
            yield ConvertedTensor(info, RowRange(whole, half * ff, ff), (tensor,))


@register("GraniteMoeHybridForCausalLM")
class GraniteMoeHybrid(GraniteMoe):
    """Granite 4. With Mamba-2 in some layers it is GGUF `granitehybrid`; others `granitemoe`, or
    `granite` if they have no routed experts, where what is stored as the shared one is the
    feed-forward.
    """

    other_names = ("granite", "granitehybrid")
    shared_by_default = 1024

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.mamba = self._mamba() if any(self.recurrent) else None
        self.has_positions = config.string("position_embedding_type", default=None) == "rope"
        if not self.n_experts:
            self.has_experts = False
            if not self.n_ff_shared:
                raise ConfigError(
                    "key 'shared_intermediate_size' is 0, and there are no routed experts: layers"
                    " have no feed-forward",
                    file=config.file,
                )
            self.n_ff = self.n_ff_shared
        if self.mamba is None and self.n_experts and not self.has_positions:
            # The newest runtimes rotate heads of granitemoe whatever this key says.
            raise ConfigError(
                "key 'position_embedding_type' is not rope; GGUF's granitemoe implies rope",
                file=config.file,
            )

    def read_config(self, checkpoint: Checkpoint) -> Config:
        config = super().read_config(checkpoint)
        self.recurrent = self._recurrent_layers(config)
        self.n_experts = config.integer("num_local_experts", minimum=0, default=8)
        # The name is chosen here because errors about other keys have it.
        if any(self.recurrent):
            self.gguf_name = "granitehybrid"
        elif not self.n_experts:
            self.gguf_name = "granite"
        return config

    def _recurrent_layers(self, config: Config) -> tuple[bool, ...]:
        """Return whether each layer has Mamba-2: all, unless config.json names their kinds."""
        kinds = config.strings("layer_types", "layers_block_type", default=[])
        if not kinds:
            return (True,) * config.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        if len(kinds) != (n := config.integer("num_hidden_layers")):
            raise ConfigError(
                f"key 'layer_types' has {len(kinds)} items for {n} layers",
                file=config.file,
            )
        for layer, kind in enumerate(kinds):
            if kind not in (*_ATTENDING, *_RECURRENT):
                raise ConfigError(
                    f"key 'layer_types' has '{printable(kind)}' for layer {layer}, expected"
                    f" {', '.join((*_ATTENDING, *_RECURRENT))}",
                    file=config.file,
                )
        return tuple(kind in _RECURRENT for kind in kinds)

    def _mamba(self) -> Mamba2:
        """Return the sizes of layers with Mamba-2. Raise ConfigError for what GGUF cannot say."""
        config = self.config
        heads = config.integer("mamba_n_heads", default=128)
        inner = config.integer("mamba_expand", default=2) * self.n_embd
        size = config.values.get("mamba_d_head")
        size = inner // heads if size in (None, "auto") else config.integer("mamba_d_head")
        if heads * size != inner:
            raise ConfigError(
                f"{heads} heads of Mamba layers with {size} elements are not {inner} elements",
                file=config.file,
            )
        check_flag(config, "granitehybrid", "mamba_proj_bias", False)
        found = Mamba2(
            f"{LAYER}.mamba",
            heads,
            size,
            config.integer("mamba_d_state", default=256),
            config.integer("mamba_n_groups", default=1),
            config.integer("mamba_d_conv", default=4),
            config.boolean("mamba_conv_bias", default=True),
        )
        found.check(config)
        return found

    def read_expert_sizes(self) -> None:
        self.n_experts_used, self.n_ff_expert = 0, self.n_ff
        if self.n_experts:
            super().read_expert_sizes()

    def expert_layers(self) -> range:
        return range(self.first_layer, self.n_layers) if self.n_experts else range(0)

    def expert_keys(self) -> dict[str, Value]:
        return super().expert_keys() if self.n_experts else {}

    def family_keys(self) -> dict[str, Value]:
        keys = super().family_keys()
        if self.mamba is not None:
            if not self.has_positions:
                # Texts may have any length; the reference writes this one.
                keys["context_length"] = u32(1 << 20)
            heads = [0 if recurrent else self.n_kv_heads for recurrent in self.recurrent]
            keys["attention.head_count_kv"] = array(ValueType.INT32, heads)
            keys |= self.mamba.keys
        # Runtimes rotate heads of granite and granitehybrid where this is true.
        return keys | {"rope.scaling.finetuned": boolean(self.has_positions)}

    def weights(self) -> list[Weight]:
        table = super().weights()
        if self.mamba is None:
            return table

        def of_kind(shape: Shape, recurrent: bool) -> Callable[[int], Shape | None]:
            return lambda layer: shape if self.recurrent[layer] == recurrent else None

        attending = [
            replace(weight, shape=of_kind(weight.shape, False))
            if weight.stored.startswith(f"{LAYER}.self_attn.") and not callable(weight.shape)
            else weight
            for weight in table
        ]
        return [*attending, *self.mamba.weights(self.n_embd, lambda shape: of_kind(shape, True))]

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if self.mamba is None or suffix == "bias":
            return made
        return self.mamba.shaped(self.checkpoint, tensor, weight, made)

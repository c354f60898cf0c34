"""LFM2 and LFM2.5: gated short convolutions in most layers and attention in the others, without
experts or with them after leading dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, f32, u32
from ..checkpoint.folder import Checkpoint
from ..tensors.stored import StoredTensor
from .base import Architecture
from .blocks import LAYER, in_layers
from .experts import DOWN, GATE, UP, RoutedExperts
from .implied import GLOBAL, check_flag, check_number
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Shape, Weight, check_shape

_CONV = "conv"  # the kind of a layer with a convolution
_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_CHOICE_BIAS = f"{LAYER}.feed_forward.expert_bias"


@register("Lfm2ForCausalLM", "LFM2ForCausalLM")
class Lfm2(Architecture):
    """LFM2 without experts; GGUF `lfm2`."""

    gguf_name = "lfm2"
    pre_names: ClassVar[dict[str, str]] = {"llama-bpe": "lfm2"}
    tied_by_default = True
    always_names_head_size = False
    ff_is_optional = True  # or it has an older name
    class_defaults: ClassVar[dict[str, object]] = {
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.tied = config.boolean("tie_embedding", default=self.tied)
        self.n_ff = self.hidden_size()
        self.n_taps = config.integer("conv_L_cache", minimum=2, maximum=64)
        check_flag(config, self.gguf_name, "conv_bias", False)
        self.kinds = self.layer_kinds()

    def hidden_size(self) -> int:
        """Return the width of the feed-forward layers."""
        config = self.config
        n = config.integer("block_ff_dim", "intermediate_size")
        if not config.boolean("block_auto_adjust_ff_dim", default=True):
            return n
        n = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n / 3))
        unit = config.integer("block_multiple_of", default=256)
        return -(-n // unit) * unit

    def layer_kinds(self) -> list[str]:
        """Return `conv` or `full_attention` for each layer. Raise ConfigError for other kinds."""
        every = list(range(self.n_layers))
        attends = set(self.config.integers("full_attn_idxs", default=every))
        by_number = [GLOBAL if layer in attends else _CONV for layer in every]
        kinds = self.config.strings("layer_types", default=by_number)
        other = next((kind for kind in kinds if kind not in (_CONV, GLOBAL)), None)
        if other is not None or len(kinds) != self.n_layers:
            raise ConfigError(
                f"key 'layer_types' has {len(kinds)} items"
                + (f", one of them '{printable(other)}'" if other is not None else "")
                + f"; expected {self.n_layers} times {_CONV} or {GLOBAL}",
                file=self.config.file,
            )
        return kinds

    def of_kind(self, kind: str, shape: Shape) -> Callable[[int], Shape | None]:
        """Return a shape for `Weight` that only layers of this kind have."""
        return lambda layer: shape if self.kinds[layer] == kind else None

    def has_window(self) -> bool:
        return False  # the class has none, whatever config.json says

    def metadata(self) -> dict[str, Value]:
        heads = [0 if kind == _CONV else self.n_kv_heads for kind in self.kinds]
        key = f"{self.gguf_name}.attention.head_count_kv"
        return super().metadata() | {key: array(ValueType.INT32, heads)}

    def norm_keys(self) -> dict[str, Value]:
        return {"attention.layer_norm_rms_epsilon": f32(self.config.number("norm_eps"))}

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), "shortconv.l_cache": u32(self.n_taps)}

    def feed_forward(self) -> list[Weight]:
        """Return the rows of gate, up and down in dense layers."""
        return self.dense_rows(range(self.n_layers))

    def dense_rows(self, layers: range) -> list[Weight]:
        """Return the rows of gate and up [n_ff, n_embd] and of down [n_embd, n_ff] in `layers`."""
        d, ff = self.n_embd, self.n_ff
        return [
            Weight(
                f"{LAYER}.feed_forward.{stored}",
                f"blk.{{}}.ffn_{part}",
                in_layers(layers, (d, ff) if part == "down" else (ff, d)),
            )
            for stored, part in _PARTS.items()
        ]

    def weights(self) -> list[Weight]:
        d, head, kv = self.n_embd, self.head_size, self.n_kv_heads * self.head_size
        q = self.n_heads * head
        rows: list[tuple[str, str, str, Shape]] = [
            (GLOBAL, "self_attn.q_proj", "attn_q", (q, d)),
            (GLOBAL, "self_attn.k_proj", "attn_k", (kv, d)),
            (GLOBAL, "self_attn.v_proj", "attn_v", (kv, d)),
            (GLOBAL, "self_attn.out_proj", "attn_output", (d, q)),
            (GLOBAL, "self_attn.q_layernorm", "attn_q_norm", (head,)),
            (GLOBAL, "self_attn.k_layernorm", "attn_k_norm", (head,)),
            (_CONV, "conv.in_proj", "shortconv.in_proj", (3 * d, d)),
            (_CONV, "conv.conv", "shortconv.conv", (d, self.n_taps)),
            (_CONV, "conv.out_proj", "shortconv.out_proj", (d, d)),
        ]
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.embedding_norm", "token_embd_norm", (d,)),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.operator_norm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.ffn_norm", "blk.{}.ffn_norm", (d,)),
            *(
                Weight(f"{LAYER}.{stored}", f"blk.{{}}.{gguf}", self.of_kind(kind, shape))
                for kind, stored, gguf, shape in rows
            ),
            *self.feed_forward(),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        if name.endswith(".conv.conv.weight"):  # stored as [n_embd, 1, taps]
            check_shape(tensor, (self.n_embd, 1, self.n_taps))
            strides = tensor.strides and (tensor.strides[0], tensor.strides[2])
            tensor = replace(tensor, shape=(self.n_embd, self.n_taps), strides=strides)
        yield from super().convert(name, tensor, table)


@register("Lfm2MoeForCausalLM")
class Lfm2Moe(Lfm2, RoutedExperts):
    """LFM2 with experts; GGUF `lfm2moe`."""

    gguf_name = "lfm2moe"
    expert_stem = "model.layers.{}.feed_forward.experts"
    expert_parts: ClassVar[dict[str, str]] = {"w1": GATE, "w3": UP, "w2": DOWN}
    renormalizes = True
    class_defaults: ClassVar[dict[str, object]] = Lfm2.class_defaults | {
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        self.n_dense = config.integer("num_dense_layers", minimum=0, maximum=self.n_layers)
        # llama.cpp needs the bias in every layer with experts.
        check_flag(config, self.gguf_name, "use_expert_bias", True)
        check_number(config, self.gguf_name, "routed_scaling_factor", 1.0)

    def hidden_size(self) -> int:
        return self.config.integer("intermediate_size")

    def expert_layers(self) -> range:
        return range(self.n_dense, self.n_layers)

    def family_keys(self) -> dict[str, Value]:
        return {
            "expert_feed_forward_length": u32(self.n_ff_expert),
            "leading_dense_block_count": u32(self.n_dense),
            "expert_gating_func": u32(2),  # sigmoid
            **super().family_keys(),
        }

    def feed_forward(self) -> list[Weight]:
        sparse, n = self.expert_layers(), self.n_experts
        return [
            *self.dense_rows(range(self.n_dense)),
            Weight(
                f"{LAYER}.feed_forward.gate",
                "blk.{}.ffn_gate_inp",
                in_layers(sparse, (n, self.n_embd)),
            ),
            Weight(_CHOICE_BIAS, "blk.{}.exp_probs_b.bias", in_layers(sparse, (n,)), exact=True),
        ]

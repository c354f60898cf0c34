"""Falcon-H1: attention and a state-space layer of Mamba-2 side by side in every layer, with factors
of embeddings, of what layers read and give, and of logits.

GGUF has no keys for the factors: matrices are multiplied by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ...errors import ConfigError
from ...formats.source import TensorInfo
from ...formats.types import TYPES
from ...formats.values import Value, u32
from ..checkpoint.config import Config
from ..checkpoint.folder import Checkpoint
from ..tensors.rows import StoredRows
from ..tensors.scaled import ScaledRows
from ..tensors.stored import StoredTensor
from .base import Architecture
from .blocks import LAYER, attention
from .implied import check_flag
from .layout_options import LayoutOptions
from .mamba2 import Mamba2
from .registry import register
from .weight import ConvertedTensor, Weight

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
    *("attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)


@register("FalconH1ForCausalLM")
class FalconH1(Architecture):
    """Falcon-H1 of all sizes; GGUF `falcon-h1`."""

    gguf_name = "falcon-h1"
    pre_names: ClassVar[dict[str, str]] = {"llama-bpe": "falcon-h1"}
    class_defaults: ClassVar[dict[str, object]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        **dict.fromkeys(_FACTORS, 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config = self.config
        normed = config.boolean("mamba_rms_norm", default=False)
        if normed:
            check_flag(config, self.gguf_name, "mamba_norm_before_gate", False)
            if "mamba_norm_before_gate" not in config:  # the class's own value is the other one
                raise ConfigError(
                    "key 'mamba_norm_before_gate' is missing, so the norm of Mamba layers comes"
                    " before their gate; GGUF's falcon-h1 has it after the gate",
                    file=config.file,
                )
        for key in _BIASES:
            check_flag(config, self.gguf_name, key, False)
        check_flag(config, self.gguf_name, "mamba_use_mlp", True)
        if config.values.get("attn_layer_indices") is not None:
            raise ConfigError(
                "key 'attn_layer_indices' is set; GGUF's falcon-h1 has attention in all layers",
                file=config.file,
            )
        self.mamba = self._mamba(config, normed)
        self._scales = self._all_scales(config)

    def has_window(self) -> bool:
        return False  # the class has none, whatever config.json says

    def _mamba(self, config: Config, normed: bool) -> Mamba2:
        heads = config.integer("mamba_n_heads", default=128)
        inner = config.integer("mamba_d_ssm", default=None)
        inner = inner or config.integer("mamba_expand", default=2) * self.n_embd
        size = config.values.get("mamba_d_head")
        size = inner // heads if size in (None, "auto") else config.integer("mamba_d_head")
        if heads * size != inner:
            raise ConfigError(
                f"{heads} heads of Mamba layers with {size} elements are not {inner} elements",
                file=config.file,
            )
        found = Mamba2(
            f"{LAYER}.mamba",
            heads,
            size,
            config.integer("mamba_d_state", default=256),
            config.integer("mamba_n_groups", default=1),
            config.integer("mamba_d_conv", default=4),
            config.boolean("mamba_conv_bias", default=True),
            normed,
        )
        found.check(config)
        return found

    def _all_scales(self, config: Config) -> dict[str, list[float | np.ndarray]]:
        """Return what the rows of matrices are multiplied by, one after the other, by stored name.
        Numbers, or float32 with one for each row.
        """
        of = {key: config.number(key, positive=False) for key in _FACTORS}
        gate, down = config.numbers("mlp_multipliers", length=2)
        parts = config.numbers("ssm_multipliers", length=5)
        m = self.mamba
        vectors = m.groups * m.state
        inputs = np.repeat(
            np.array(parts, np.float32), [m.inner, m.inner, vectors, vectors, m.heads]
        )
        read = of["attention_in_multiplier"]
        found: dict[str, list[float | np.ndarray]] = {
            _EMBEDDING: [of["embedding_multiplier"]],
            _HEAD: [of["lm_head_multiplier"]],
            f"{LAYER}.self_attn.q_proj": [read],
            f"{LAYER}.self_attn.k_proj": [of["key_multiplier"], read],
            f"{LAYER}.self_attn.v_proj": [read],
            f"{LAYER}.self_attn.o_proj": [of["attention_out_multiplier"]],
            f"{LAYER}.mamba.in_proj": [of["ssm_in_multiplier"], inputs],
            f"{LAYER}.mamba.out_proj": [of["ssm_out_multiplier"]],
            f"{LAYER}.feed_forward.gate_proj": [gate],
            f"{LAYER}.feed_forward.down_proj": [down],
        }
        return {name: scales for name, scales in found.items() if any(map(_changes, scales))}

    # --- metadata

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), **self.mamba.keys}

    # --- tensors

    def weights(self) -> list[Weight]:
        d, ff, feed = self.n_embd, self.n_ff, f"{LAYER}.feed_forward"
        return [
            Weight(_EMBEDDING, "token_embd", (self.n_vocab, d)),
            Weight("model.final_layernorm", "output_norm", (d,)),
            Weight(_HEAD, "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            # Without a suffix, as the reference reads and writes it.
            Weight(f"{LAYER}.pre_ff_layernorm.weight", "blk.{}.ffn_norm", (d,), exact=True),
            *attention(self, bias=False, output_bias=False),
            *self.mamba.weights(d, lambda shape: lambda layer: shape),
            Weight(f"{feed}.gate_proj", "blk.{}.ffn_gate", (ff, d)),
            Weight(f"{feed}.up_proj", "blk.{}.ffn_up", (ff, d)),
            Weight(f"{feed}.down_proj", "blk.{}.ffn_down", (d, ff)),
        ]

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        yield from super().convert(name, tensor, table)
        # Embeddings and logits have factors of their own, so one matrix cannot be both.
        if self.tied and name == f"{_EMBEDDING}.weight" and self._scales_head_alone:
            info = TensorInfo("output.weight", tensor.shape, self.checkpoint.type_of(tensor))
            yield self._scaled(tensor, _HEAD, ConvertedTensor(info, self._rows(tensor), (tensor,)))

    @property
    def _scales_head_alone(self) -> bool:
        return self._scales.get(_HEAD) != self._scales.get(_EMBEDDING)

    def mapped(
        self, tensor: StoredTensor, weight: Weight, suffix: str, layer: int | None
    ) -> ConvertedTensor:
        made = super().mapped(tensor, weight, suffix, layer)
        if suffix == "bias":
            return made
        made = self.mamba.shaped(self.checkpoint, tensor, weight, made)
        return self._scaled(tensor, weight.stored, made)

    def _scaled(self, tensor: StoredTensor, name: str, made: ConvertedTensor) -> ConvertedTensor:
        """Return the output tensor `made` of a stored matrix times the factors of `name`."""
        if (scales := self._scales.get(name)) is None:
            return made
        rows = ScaledRows(self._rows(tensor), self.checkpoint.type_of(tensor), scales)
        return ConvertedTensor(made.info.with_type(TYPES["F32"]), rows, made.made_of)

    def _rows(self, tensor: StoredTensor) -> StoredRows:
        return StoredRows(self.checkpoint, tensor)


def _changes(scale: float | np.ndarray) -> bool:
    return bool(np.any(np.float32(scale) != 1))

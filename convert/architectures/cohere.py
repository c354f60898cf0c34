"""Cohere's Command and Aya: LayerNorms without biases, one before attention and feed-forward, which
are side by side, a factor of logits, and an output matrix that is the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ...errors import CheckpointError, ConfigError
from ...formats.codecs.codec import decode
from ...formats.values import Value, f32, string, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from ..tensors.rows import StoredRows
from ..tensors.stored import StoredTensor
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .implied import check_flag, check_number, global_period
from .layout_options import LayoutOptions
from .registry import register
from .weight import ConvertedTensor, Weight, split_numbers

_PERIOD = 4  # of layers with full attention, in files that do not say


_PLAIN = {"rope.scaling.type": string("none")}


class _PlainRope(RopeConfig):
    """Rotations without scaling."""

    kinds = ("default",)


class ZeroBiases(Architecture):
    """Some checkpoints store biases that the class does not have. They must be zero. In a list of
    bases it comes first.
    """

    def convert(
        self, name: str, tensor: StoredTensor, table: dict[str, Weight]
    ) -> Iterator[ConvertedTensor]:
        stem, _, suffix = name.rpartition(".")
        if suffix == "bias" and split_numbers(stem)[0] in table:
            self._check_zero(tensor)
            return
        yield from super().convert(name, tensor, table)

    def _check_zero(self, tensor: StoredTensor) -> None:
        rows = StoredRows(self.checkpoint, tensor, 1).read(0, 1)
        if np.any(decode(self.checkpoint.type_of(tensor), rows, tensor.n_elements)):
            raise CheckpointError(
                f"is not zero; GGUF's {self.gguf_name} has no biases",
                file=tensor.file,
                tensor=tensor.name,
            )


class CohereBase(Architecture):
    """What both generations share."""

    tied_by_default = True
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        config, name = self.config, self.gguf_name
        check_flag(config, name, "tie_word_embeddings", True)
        check_flag(config, name, "attention_bias", False)
        if self.head_size * self.n_heads != self.n_embd:
            raise ConfigError(
                f"key 'head_dim' is {self.head_size}; GGUF's {name} implies hidden_size"
                f" {self.n_embd} / {self.n_heads} heads",
                file=config.file,
            )

    def make_rope(self) -> RopeConfig:
        return _PlainRope(self.config, self.head_size)

    def norm_keys(self) -> dict[str, Value]:
        return {"attention.layer_norm_epsilon": f32(self.config.number("layer_norm_eps"))}

    def family_keys(self) -> dict[str, Value]:
        return {"logit_scale": f32(self.config.number("logit_scale"))}

    def weights(self) -> list[Weight]:
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (self.n_embd,)),
            *attention(self, bias=False, output_bias=False),
            *gated_feed_forward(self),
        ]


@register("CohereForCausalLM")
class CommandR(CohereBase):
    """Command R, Command R+, Aya 23 and Aya Expanse; GGUF `command-r`."""

    gguf_name = "command-r"

    def metadata(self) -> dict[str, Value]:
        keys = super().metadata()
        # The other key is what a text had at most while the first models were published.
        if "model_max_length" in self.config:
            context = self.config.integer("model_max_length")
            keys[f"{self.gguf_name}.context_length"] = u32(context)
        return keys

    def family_keys(self) -> dict[str, Value]:
        return super().family_keys() | _PLAIN

    def rope_keys(self) -> dict[str, Value]:
        section = self.config.section("rope_parameters")
        if "rope_theta" not in self.config and (section is None or "rope_theta" not in section):
            # Versions of the class differ in it.
            raise ConfigError("key 'rope_theta' is missing", file=self.config.file)
        return super().rope_keys()

    def weights(self) -> list[Weight]:
        table = super().weights()
        if self.config.boolean("use_qk_norm", default=False):
            table += [
                Weight(
                    f"{LAYER}.self_attn.{part}_norm",
                    f"blk.{{}}.attn_{part}_norm",
                    (heads, self.head_size),
                )
                for part, heads in (("q", self.n_heads), ("k", self.n_kv_heads))
            ]
        return table


@register("Cohere2ForCausalLM")
class Cohere2(ZeroBiases, CohereBase):
    """Command R7B, Command A and later ones: windows in most layers, and rotations only there; GGUF
    `cohere2`.
    """

    gguf_name = "cohere2"
    has_window_key = True
    class_defaults: ClassVar[dict[str, object]] = CohereBase.class_defaults | {
        "sliding_window": 4096
    }

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        check_number(config, self.gguf_name, "rotary_pct", 1)
        check_flag(config, self.gguf_name, "use_qk_norm", False)
        period = global_period(config, self.n_layers, _PERIOD)
        pattern = {"attention.sliding_window_pattern": u32(period)} if period != _PERIOD else {}
        return {
            **super().family_keys(),
            "attention.sliding_window": u32(config.integer("sliding_window")),
            **pattern,
            "vocab_size": u32(self.n_vocab),
            "rope.dimension_count": u32(self.head_size),
            **_PLAIN,
        }

"""Nemotron 4 and Minitron: LayerNorms that are stored minus 1, a rotation of a part of each head,
and a feed-forward of squared ReLUs without a gate.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from ...formats.values import Value, f32, string, u32
from ..checkpoint.folder import Checkpoint
from ..metadata.rope import RopeConfig
from .base import Architecture
from .blocks import LAYER, attention
from .gemma2 import norms_plus_one
from .implied import check_number
from .layout_options import LayoutOptions
from .registry import register
from .weight import Weight

log = logging.getLogger(__name__)

_PADDING, _UNKNOWN = 0, 1  # in the vocabulary of every Nemotron; its tokenizer has other roles


class LinearRopeConfig(RopeConfig):
    """Nemotron's, whose kind is always named."""

    kinds = ("default", "linear")

    def scaling_keys(self) -> dict[str, Value]:
        return super().scaling_keys() or {"rope.scaling.type": string("none")}


@register("NemotronForCausalLM")
class Nemotron(Architecture):
    """Nemotron-4, Minitron, Nemotron-Mini; GGUF `nemotron`."""

    gguf_name = "nemotron"
    activation = ("hidden_act", ("relu2",))
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "hidden_act": "relu2",
    }

    def __init__(self, checkpoint: Checkpoint, options: LayoutOptions = LayoutOptions()):
        super().__init__(checkpoint, options)
        if self.tied or self.n_heads * self.head_size != self.n_embd:
            log.warning(
                "llama.cpp refuses GGUF's %s with no output matrix of its own, or with heads that"
                " are together not as long as a hidden vector",
                self.gguf_name,
            )

    def make_rope(self) -> LinearRopeConfig:
        rope = LinearRopeConfig(self.config, self.head_size)
        self.n_rotated = rope.rotated()
        # Older programs read this one.
        check_number(self.config, self.gguf_name, "rope_percent", self.n_rotated / self.head_size)
        return rope

    def norm_keys(self) -> dict[str, Value]:
        """Return both keys: the reference takes `norm_eps` for that of RMS norms, too."""
        eps = f32(self.config.number("norm_eps"))
        return {"attention.layer_norm_rms_epsilon": eps, "attention.layer_norm_epsilon": eps}

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), "rope.dimension_count": u32(self.n_rotated)}

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        return super().vocabulary(pre) | {
            "tokenizer.ggml.padding_token_id": u32(_PADDING),
            "tokenizer.ggml.unknown_token_id": u32(_UNKNOWN),
        }

    def weights(self) -> list[Weight]:
        d, ff = self.n_embd, self.n_ff
        biased = self.config.boolean("attention_bias", default=False)
        mlp = self.config.boolean("mlp_bias", default=False)
        norms = [
            Weight("model.norm", "output_norm", (d,), bias=True),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), bias=True),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,), bias=True),
        ]
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            *norms_plus_one(norms),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            *attention(self, bias=biased, output_bias=biased),
            Weight(f"{LAYER}.mlp.up_proj", "blk.{}.ffn_up", (ff, d), bias=mlp),
            Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, ff), bias=mlp),
        ]

"""Gemma 2: norms before and after attention and feed-forward, all stored minus 1; capped logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ...formats.values import Value, f32, u32
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .registry import register
from .weight import Weight


def sandwich_norms(model: Architecture) -> list[Weight]:
    """Return norms before and after attention and feed-forward, as all Gemmas since 2
    store them.
    """
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    return [
        Weight(f"{LAYER}.{stored}", f"blk.{{}}.{gguf}", (model.n_embd,))
        for stored, gguf in names.items()
    ]


def norms_plus_one(weights: list[Weight]) -> list[Weight]:
    return [
        replace(weight, plus_one=True) if weight.gguf.endswith("_norm") else weight
        for weight in weights
    ]


@register("Gemma2ForCausalLM")
class Gemma2(Architecture):
    gguf_name = "gemma2"
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 256, "rms_norm_eps": 1e-6}

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        return {
            "attn_logit_softcapping": f32(config.number("attn_logit_softcapping")),
            "final_logit_softcapping": f32(config.number("final_logit_softcapping")),
            "attention.sliding_window": u32(config.integer("sliding_window")),
        }

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return norms_plus_one(
            [
                *embedding_and_head(self),
                *sandwich_norms(self),
                *attention(self, bias=biased, output_bias=biased),
                *gated_feed_forward(self),
            ]
        )

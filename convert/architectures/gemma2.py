"""Gemma 2: norms before and after attention and feed-forward, all stored minus 1; capped logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from ...formats.values import Value, f32, u32
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .implied import TANH_GELU, check_alternating, check_number
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
    """Return the weights with 1 added to those of norms, which are stored minus 1."""
    return [
        replace(weight, plus_one=True) if weight.gguf.endswith("_norm") else weight
        for weight in weights
    ]


def check_query_scale(model: Architecture, layers_of_27b: int) -> None:
    """Raise ConfigError unless queries are divided by the root of the head size, or of width /
    heads in the model of 27 B parameters, which runtimes recognize by its number of layers.
    """
    is_27b = model.n_layers == layers_of_27b
    implied = model.n_embd / model.n_heads if is_27b else model.head_size
    check_number(model.config, model.gguf_name, "query_pre_attn_scalar", implied)


@register("Gemma2ForCausalLM")
class Gemma2(Architecture):
    """Gemma 2; GGUF `gemma2`."""

    gguf_name = "gemma2"
    activation = ("hidden_activation", TANH_GELU)
    has_window_key = True
    layers_of_27b = 46
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {"head_dim": 256, "rms_norm_eps": 1e-6}

    def family_keys(self) -> dict[str, Value]:
        config = self.config
        check_query_scale(self, self.layers_of_27b)
        check_alternating(config, self.n_layers)
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

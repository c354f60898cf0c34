"""Gemma 3: Gemma 2 with norms of query and key heads, and other rotary frequencies in layers with
local attention.
"""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value, f32, u32
from ..metadata.rope import RopeConfig
from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward
from .gemma2 import check_query_scale, norms_plus_one, sandwich_norms
from .implied import TANH_GELU, global_period
from .registry import register
from .weight import Weight

_PERIOD = 6  # of layers with full attention, in files that do not say


@register("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
class Gemma3(Architecture):
    """Gemma 3, text models; GGUF `gemma3`."""

    gguf_name = "gemma3"
    activation = ("hidden_activation", TANH_GELU)
    has_window_key = True
    layers_of_27b = 62
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    }

    def make_rope(self) -> RopeConfig:
        return RopeConfig(self.config, self.head_size, "full_attention")

    def family_keys(self) -> dict[str, Value]:
        check_query_scale(self, self.layers_of_27b)
        period = global_period(self.config, self.n_layers, _PERIOD)
        by_layers = self.config.section("rope_parameters")
        if by_layers is not None and "sliding_attention" in by_layers:
            local = RopeConfig(self.config, self.head_size, "sliding_attention").base()
        else:
            local = self.config.number("rope_local_base_freq", default=10000.0)
        keys = {
            "rope.freq_base_swa": f32(local),
            "attention.sliding_window": u32(self.config.integer("sliding_window")),
        }
        if period != _PERIOD:
            keys["attention.sliding_window_pattern"] = u32(period)
        if "final_logit_softcapping" in self.config:
            keys["final_logit_softcapping"] = f32(self.config.number("final_logit_softcapping"))
        return keys

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return norms_plus_one(
            [
                *embedding_and_head(self),
                *sandwich_norms(self),
                *attention(self, bias=biased, output_bias=biased, head_norms=True),
                *gated_feed_forward(self),
            ]
        )

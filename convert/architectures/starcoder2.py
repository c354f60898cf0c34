"""StarCoder2: LayerNorm with biases instead of RMSNorm, and a feed-forward without a gate."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value, f32
from .base import Architecture
from .blocks import LAYER, attention
from .implied import TANH_GELU
from .registry import register
from .weight import Weight


@register("Starcoder2ForCausalLM")
class StarCoder2(Architecture):
    """StarCoder2; GGUF `starcoder2`."""

    gguf_name = "starcoder2"
    activation = ("hidden_act", TANH_GELU)
    tied_by_default = True
    always_names_head_size = False
    class_defaults: ClassVar[dict[str, object]] = {"num_key_value_heads": 2, "norm_epsilon": 1e-5}

    def norm_keys(self) -> dict[str, Value]:
        return {"attention.layer_norm_epsilon": f32(self.config.number("norm_epsilon"))}

    def weights(self) -> list[Weight]:
        d, ff = self.n_embd, self.n_ff
        biased = self.config.boolean("use_bias", default=True)
        return [
            Weight("model.embed_tokens", "token_embd", (self.n_vocab, d)),
            Weight("model.norm", "output_norm", (d,), bias=True),
            Weight("lm_head", "output", (self.n_vocab, d), optional=self.tied),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,), bias=True),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.ffn_norm", (d,), bias=True),
            *attention(self, bias=biased, output_bias=biased),
            Weight(f"{LAYER}.mlp.c_fc", "blk.{}.ffn_up", (ff, d), bias=biased),
            Weight(f"{LAYER}.mlp.c_proj", "blk.{}.ffn_down", (d, ff), bias=biased),
        ]

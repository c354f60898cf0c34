"""Seed-OSS: biases of queries, keys and values, and heads of a size of their own."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value
from .base import Architecture
from .blocks import LAYER, attention, embedding_and_head, gated_feed_forward
from .implied import check_flag
from .registry import register
from .weight import Weight


@register("SeedOssForCausalLM")
class SeedOss(Architecture):
    """Seed-OSS; GGUF `seed_oss`."""

    gguf_name = "seed_oss"
    class_defaults: ClassVar[dict[str, object]] = {"num_key_value_heads": 8, "head_dim": 128}

    def family_keys(self) -> dict[str, Value]:
        for key in ("attention_out_bias", "mlp_bias"):
            check_flag(self.config, self.gguf_name, key, False)
        return {}

    def weights(self) -> list[Weight]:
        d, biased = self.n_embd, self.config.boolean("attention_bias", default=True)
        return [
            *embedding_and_head(self),
            Weight(f"{LAYER}.input_layernorm", "blk.{}.attn_norm", (d,)),
            Weight(f"{LAYER}.post_attention_layernorm", "blk.{}.post_attention_norm", (d,)),
            *attention(self, bias=biased, output_bias=False),
            *gated_feed_forward(self),
        ]

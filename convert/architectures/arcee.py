"""Arcee's AFM: Llama's attention, and a feed-forward of squared ReLUs without a gate."""

from __future__ import annotations

from .blocks import LAYER, attention, embedding_and_head, norms
from .llama import Llama
from .registry import register
from .weight import Weight


@register("ArceeForCausalLM")
class Arcee(Llama):
    """AFM-4.5B; GGUF `arcee`."""

    gguf_name = "arcee"
    activation = ("hidden_act", ("relu2",))

    def weights(self) -> list[Weight]:
        d, ff = self.n_embd, self.n_ff
        biased = self.config.boolean("attention_bias", default=False)
        mlp = self.config.boolean("mlp_bias", default=False)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, rotary_pairs=True),
            Weight(f"{LAYER}.mlp.up_proj", "blk.{}.ffn_up", (ff, d), bias=mlp),
            Weight(f"{LAYER}.mlp.down_proj", "blk.{}.ffn_down", (d, ff), bias=mlp),
        ]

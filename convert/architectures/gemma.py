"""Gemma 1: Llama's layers with scaled embeddings, GELU, and norms that are stored minus 1."""

from __future__ import annotations

from typing import ClassVar

from ...formats.values import Value, boolean, u32
from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward, norms
from .gemma2 import norms_plus_one
from .implied import TANH_GELU, check_flag, check_name
from .registry import register
from .weight import Weight

_GELU = (*TANH_GELU, "gelu")  # the first configs say `gelu`, and mean the tanh form
_END_OF_TURN = 107  # in the vocabulary of every Gemma 1; its tokenizer has no name for the role


@register("GemmaForCausalLM")
class Gemma(Architecture):
    """Gemma 2B and 7B, CodeGemma; GGUF `gemma`."""

    gguf_name = "gemma"
    activation = ("hidden_act", _GELU)
    tied_by_default = True
    class_defaults: ClassVar[dict[str, object]] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }

    def rope_keys(self) -> dict[str, Value]:
        """Return the keys of a rotation that is not the usual one: llama.cpp's converter writes
        none.
        """
        scaled = self.rope.scaling_keys()
        return super().rope_keys() if scaled or self.rope.base() != 10000.0 else {}

    def family_keys(self) -> dict[str, Value]:
        check_name(self.config, self.gguf_name, "hidden_activation", _GELU)
        check_flag(self.config, self.gguf_name, "tie_word_embeddings", True)
        check_flag(self.config, self.gguf_name, "use_bidirectional_attention", False)
        return {}

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        keys = super().vocabulary(pre)
        keys["tokenizer.ggml.add_space_prefix"] = boolean(False)
        if self.n_vocab > _END_OF_TURN:
            keys["tokenizer.ggml.eot_token_id"] = u32(_END_OF_TURN)
        return keys

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return norms_plus_one(
            [
                *embedding_and_head(self),
                *norms(self),
                *attention(self, bias=biased, output_bias=biased),
                *gated_feed_forward(self),
            ]
        )

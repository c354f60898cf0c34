"""Llama and families with the same tensors: multi-head or grouped-query attention, gated
feed-forward, rotary pairs side by side.
"""

from __future__ import annotations

from ...formats.values import Value, boolean, u32
from .base import Architecture
from .blocks import attention, embedding_and_head, gated_feed_forward, norms
from .registry import register
from .weight import Weight

# Code Llama's tokens for filling in the middle. No file of its tokenizer gives them a role, so the
# model is recognized by the size of its vocabulary.
_CODE_LLAMA_VOCAB = 32016
_CODE_LLAMA_TOKENS = {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010}
_NO_BOS_VOCAB = (
    49152  # small models with StarCoder's vocabulary, which has no token at the beginning of a text
)


@register("LlamaForCausalLM", "MistralForCausalLM")
class Llama(Architecture):
    """Llama and families with its tensors; GGUF `llama`."""

    gguf_name = "llama"

    def family_keys(self) -> dict[str, Value]:
        return {"vocab_size": u32(self.n_vocab), "rope.dimension_count": u32(self.head_size)}

    def vocabulary(self, pre: str | None) -> dict[str, Value]:
        keys = super().vocabulary(pre)
        if self.n_vocab == _CODE_LLAMA_VOCAB:
            keys |= {
                f"tokenizer.ggml.{role}_token_id": u32(number)
                for role, number in _CODE_LLAMA_TOKENS.items()
            }
        if self.n_vocab == _NO_BOS_VOCAB:
            keys["tokenizer.ggml.add_bos_token"] = boolean(False)
        return keys

    def weights(self) -> list[Weight]:
        biased = self.config.boolean("attention_bias", default=False)
        return [
            *embedding_and_head(self),
            *norms(self),
            *attention(self, bias=biased, output_bias=biased, rotary_pairs=True),
            *gated_feed_forward(self, bias=self.config.boolean("mlp_bias", default=False)),
        ]

"""gemma: Gemma 1. Llama's layers with scaled embeddings and GELU."""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("gemma", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        ffn = d.ffn(layer, hidden[layer], FFNSpec("gelu"))
        return d.block(layer, d.attention(layer, rope), ffn)

    return d.network(block, embedding_scale=d.width**0.5)

"""starcoder2: LayerNorms and biases everywhere, and a feed-forward layer without a gate."""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("starcoder2", gpu=True, layer_norm=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)
    window = d.p.integer("attention.sliding_window", 0, least=0)
    spec = FFNSpec("gelu", gated=False)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, window=window)
        return d.block(layer, attention, d.ffn(layer, hidden[layer], spec))

    return d.network(block)

"""phi3: Phi-3 and Phi-4. Query, key and value are one matrix, gate and up another.

Files for long contexts have two sets of frequency factors.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.long_rope import any_rope
from ..network.network import Network
from . import architecture


@architecture("phi3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = any_rope(d, "neox"), d.p.per_layer("feed_forward_length", d.n_layers)
    window = d.p.integer("attention.sliding_window", 0, least=0)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, window=window)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)

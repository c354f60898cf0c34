"""nemotron: Nemotron 4 and Minitron. LayerNorms with biases, a rotation of a part of each head, and
squared ReLUs instead of gates in the feed-forward layers.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("nemotron", gpu=True, layer_norm=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)
    spec = FFNSpec("relu_squared", gated=False)

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope), d.ffn(layer, hidden[layer], spec))

    return d.network(block)

"""internlm2: InternLM2 and 2.5, whose files are like those of Llama."""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("internlm2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("norm"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope), d.ffn(layer, hidden[layer]))

    return d.network(block)

"""smollm3: SmolLM3. Every fourth layer has no rotation; no key says so."""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_PERIOD = 4


@architecture("smollm3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("norm"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        rotated = (layer + 1) % _PERIOD != 0
        attention = d.attention(layer, rope if rotated else None)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)

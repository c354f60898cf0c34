"""falcon-h1: Falcon-H1, attention and a state-space layer of Mamba-2 side by side in every layer.

The factors of the model are in the matrices. Released models have no norm in their state-space
layers.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from ..network.state_space_parts import state_space
from . import architecture


@architecture("falcon-h1", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)
    scale = d.p.number("attention.scale", 0.0, least=0) or None

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, scale=scale)
        states = state_space(d, layer, may_lack_norm=True)
        return d.block(layer, d.side_by_side(layer, attention, states), d.ffn(layer, hidden[layer]))

    return d.network(block)

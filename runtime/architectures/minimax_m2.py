"""minimax-m2: norms of queries and keys over all heads together, and experts in every layer."""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("minimax-m2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, router = d.rope("neox"), router_spec(d, "sigmoid")
    hidden = d.p.integer("expert_feed_forward_length")

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, joined_norms=True)
        return d.block(layer, attention, moe(d, layer, hidden, router))

    return d.network(block)

"""olmoe: norms of queries and keys over all heads, and experts in every layer, whose weights are
not normalized.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("olmoe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, router = d.rope("neox"), router_spec(d, norm=False)
    hidden = d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, joined_norms=True)
        return d.block(layer, attention, moe(d, layer, hidden[layer], router))

    return d.network(block)

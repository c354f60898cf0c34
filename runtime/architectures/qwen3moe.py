"""qwen3moe: Qwen3 with experts in every layer.

Query and key heads are normalized before the rotation, whose pairs are half a head apart. The head
size is a separate key. qwen3vlmoe is the same for texts, in which all positions of a token are
equal.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("qwen3moe", "qwen3vlmoe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, router = d.rope("neox"), router_spec(d)
    hidden = d.p.integer("expert_feed_forward_length")

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, head_norms=True)
        return d.block(layer, attention, moe(d, layer, hidden, router))

    return d.network(block)

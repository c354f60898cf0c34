"""qwen3: Qwen3 without experts. Query and key heads are normalized before the rotation. The head
size is a separate key. qwen3vl is the same for texts, in which all positions of a token are equal.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("qwen3", "qwen3vl", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, head_norms=True)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)

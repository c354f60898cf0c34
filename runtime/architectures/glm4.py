"""glm4: GLM-4-0414 and GLM-Z1. Norms before and after attention and feed-forward; half of each head
is rotated, in pairs of neighbours.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("glm4", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("norm"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        return d.block(
            layer,
            d.attention(layer, rope),
            d.ffn(layer, hidden[layer]),
            post_norms=("post_attention_norm", "post_ffw_norm"),
        )

    return d.network(block)

"""seed_oss: Seed-OSS. Queries, keys and values have biases; the norm before the feed-forward has
another name.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("seed_oss", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        return d.block(
            layer,
            d.attention(layer, rope),
            d.ffn(layer, hidden[layer]),
            norms=("attn_norm", "post_attention_norm"),
        )

    return d.network(block)

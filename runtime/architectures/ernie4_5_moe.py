"""ernie4_5-moe: ERNIE 4.5 with experts. Leading layers are dense; others have experts that are
chosen by softmax scores with a bias, and a shared one.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("ernie4_5-moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("norm"), router_spec(d)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    n_dense = p.integer("leading_dense_block_count", 0, least=0)
    interval = p.integer("interleave_moe_layer_step", 1)
    expert_hidden = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", 0, least=0)

    def block(layer: int) -> Block:
        dense = layer < n_dense or (layer + 1) % interval != 0
        ffn = (
            d.ffn(layer, hidden[layer])
            if dense
            else moe(d, layer, expert_hidden, router, shared=shared)
        )
        return d.block(layer, d.attention(layer, rope), ffn)

    return d.network(block)

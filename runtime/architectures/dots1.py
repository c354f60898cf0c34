"""dots1: dots.llm1. Attention is Qwen3's. Leading layers are dense; others have experts that are
chosen by sigmoid scores with a bias, and shared ones.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("dots1", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("neox"), router_spec(d, "sigmoid", norm=False)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    n_dense = p.integer("leading_dense_block_count", 0, least=0)
    expert_hidden = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_count", 0, least=0) * expert_hidden

    def block(layer: int) -> Block:
        ffn = (
            d.ffn(layer, hidden[layer])
            if layer < n_dense
            else moe(d, layer, expert_hidden, router, shared=shared)
        )
        return d.block(layer, d.attention(layer, rope, head_norms=True), ffn)

    return d.network(block)

"""hunyuan-dense and hunyuan-moe: Hunyuan 0.5B to 7B, and Hunyuan-A13B with experts in every layer,
next to a shared one. Norms of query and key heads follow the rotation.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("hunyuan-dense", gpu=True)
def build_dense(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, head_norms=True, norms_last=True)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)


@architecture("hunyuan-moe", gpu=True)
def build_moe(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("neox"), router_spec(d)
    hidden = p.integer("expert_feed_forward_length")
    shared = p.per_layer("feed_forward_length", d.n_layers)
    width = p.integer("expert_shared_feed_forward_length", 0, least=0)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, head_norms=True, norms_last=True)
        return d.block(
            layer, attention, moe(d, layer, hidden, router, shared=width or shared[layer])
        )

    return d.network(block)

"""nemotron_h and nemotron_h_moe: Nemotron-H and Nemotron 3, whose layers are each a state-space
layer of Mamba-2, attention without positions, or a feed-forward layer with squared ReLU, of which
the second architecture has experts, a shared one, and shorter vectors for the others in some
models.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from ..network.state_space_parts import state_space
from . import architecture

_RELU_SQUARED = FFNSpec("relu_squared", gated=False)


@architecture("nemotron_h", "nemotron_h_moe", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p = d.p
    hidden = p.per_layer("feed_forward_length", p.integer("block_count"), least=0)
    scale = p.number("attention.scale", 0.0, least=0) or None
    router, of_expert, shared, latent = None, 0, 0, 0
    if p.integer("expert_count", 0, least=0):
        router = router_spec(d, "sigmoid", norm=False)
        of_expert = p.integer("expert_feed_forward_length")
        shared = p.integer("expert_shared_feed_forward_length", 0, least=0)
        latent = p.integer("moe_latent_size", 0, least=0)

    def block(layer: int) -> Block:
        if d.kv_heads[layer]:
            return d.single_block(layer, d.attention(layer, None, scale=scale), mixer=True)
        if not hidden[layer]:
            return d.single_block(layer, state_space(d, layer), mixer=True)
        if router is None:
            ffn = d.ffn(layer, hidden[layer], _RELU_SQUARED)
        else:
            ffn = moe(d, layer, of_expert, router, ffn=_RELU_SQUARED, shared=shared, latent=latent)
        return d.single_block(layer, ffn, mixer=False)

    return d.network(block)

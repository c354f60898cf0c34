"""qwen2moe: Qwen1.5-MoE and Qwen2-MoE. Weights of experts are not normalized, and a gate decides
how much of the shared expert every token gets.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("qwen2moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, router = d.rope("neox"), router_spec(d, norm=False)
    hidden = d.p.integer("expert_feed_forward_length")
    shared = d.p.integer("expert_shared_feed_forward_length")

    def block(layer: int) -> Block:
        return d.block(
            layer, d.attention(layer, rope), moe(d, layer, hidden, router, shared=shared)
        )

    return d.network(block)

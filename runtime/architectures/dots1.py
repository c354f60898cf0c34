"""dots1: dots.llm1. Attention is Qwen3's. Leading layers are dense; others have experts that are
chosen by sigmoid scores with a bias, and shared ones.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from . import architecture


@architecture("dots1", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, ffn = d.rope("neox"), dense_then_experts(d, router_spec(d, "sigmoid", norm=False))

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope, head_norms=True), ffn(layer))

    return d.network(block)

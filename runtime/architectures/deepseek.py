"""deepseek: DeepSeekMoE. Llama's attention; dense layers first, then experts that the softmax of
their scores chooses, whose weights are not normalized, and shared ones.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from . import architecture


@architecture("deepseek", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, ffn = d.rope("norm"), dense_then_experts(d, router_spec(d, norm=False))

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope), ffn(layer))

    return d.network(block)

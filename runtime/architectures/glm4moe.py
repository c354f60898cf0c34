"""glm4moe: GLM-4.5, 4.6 and 4.7. Leading layers are dense; others have experts that are chosen by
sigmoid scores with a bias, and a shared one. Only half of each head is rotated.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from . import architecture


@architecture("glm4moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, ffn = d.rope("neox"), dense_then_experts(d, router_spec(d, "sigmoid"))

    def block(layer: int) -> Block:
        head_norms = d.w.has(f"blk.{layer}.attn_q_norm.weight")  # not in GLM-4.5-Air
        attention = d.attention(layer, rope, head_norms=head_norms)
        return d.block(layer, attention, ffn(layer), norms=("attn_norm", "post_attention_norm"))

    return d.network(block)

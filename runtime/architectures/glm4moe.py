"""glm4moe: GLM-4.5, 4.6 and 4.7. Leading layers are dense; others have experts that are chosen by
sigmoid scores with a bias, and a shared one. Only half of each head is rotated.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("glm4moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("neox"), router_spec(d, "sigmoid")
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    n_dense = p.integer("leading_dense_block_count", 0, least=0)
    expert_hidden = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_count", 0, least=0) * expert_hidden

    def block(layer: int) -> Block:
        head_norms = d.w.has(f"blk.{layer}.attn_q_norm.weight")  # not in GLM-4.5-Air
        ffn = (
            d.ffn(layer, hidden[layer])
            if layer < n_dense
            else moe(d, layer, expert_hidden, router, shared=shared)
        )
        attention = d.attention(layer, rope, head_norms=head_norms)
        return d.block(layer, attention, ffn, norms=("attn_norm", "post_attention_norm"))

    return d.network(block)

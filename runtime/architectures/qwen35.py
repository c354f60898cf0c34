"""qwen35 and qwen35moe: Qwen3.5, gated delta nets with gated attention in every fourth layer, dense
or with experts and a gated shared one.

Value heads of delta nets that read the same key head are `key_heads` apart. Positions of text are
the same for time, height and width, so that the rotation by sections is the plain one.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.delta_net_parts import delta_net, recurrent_layers
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("qwen35", "qwen35moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("neox")
    recurrent = recurrent_layers(d)
    router = router_spec(d) if p.integer("expert_count", 0, least=0) else None
    hidden = p.integer("feed_forward_length" if router is None else "expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", 0, least=0)

    def block(layer: int) -> Block:
        mixer = (
            delta_net(d, layer)
            if recurrent[layer]
            else d.attention(layer, rope, head_norms=True, gate=True)
        )
        ffn = (
            d.ffn(layer, hidden) if router is None else moe(d, layer, hidden, router, shared=shared)
        )
        return d.block(layer, mixer, ffn, norms=("attn_norm", "post_attention_norm"))

    return d.network(block)

"""qwen3next: Qwen3-Next, gated delta nets with gated attention in every fourth layer, and experts
with a gated shared one.

Value heads of delta nets that read the same key head are side by side.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.delta_net_parts import delta_net, recurrent_layers
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("qwen3next", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("neox"), router_spec(d)
    recurrent = recurrent_layers(d)
    hidden = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", 0, least=0)
    dense = p.per_layer("feed_forward_length", d.n_layers, (hidden,) * d.n_layers)

    def block(layer: int) -> Block:
        mixer = (
            delta_net(d, layer)
            if recurrent[layer]
            else d.attention(layer, rope, head_norms=True, gate=True)
        )
        has_experts = d.w.has(f"blk.{layer}.ffn_gate_inp.weight")
        ffn = (
            moe(d, layer, hidden, router, shared=shared)
            if has_experts
            else d.ffn(layer, dense[layer])
        )
        return d.block(layer, mixer, ffn, norms=("attn_norm", "post_attention_norm"))

    return d.network(block)

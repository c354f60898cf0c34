"""lfm2, lfm2moe: gated short convolutions in most layers, attention with norms of queries and keys
in the others. With experts, leading layers are dense; sigmoid scores with a bias choose.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from ..network.short_conv_parts import short_conv
from . import architecture


@architecture("lfm2", "lfm2moe", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("neox")
    window = p.integer("attention.sliding_window", 0, least=0)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    ffn = (
        dense_then_experts(d, router_spec(d, "sigmoid"))
        if p.architecture == "lfm2moe"
        else lambda layer: d.ffn(layer, hidden[layer])
    )

    def block(layer: int) -> Block:
        mixer = (
            d.attention(layer, rope, head_norms=True, window=window)
            if d.kv_heads[layer]
            else short_conv(d, layer)
        )
        return d.block(layer, mixer, ffn(layer))

    return d.network(block, last_norm="token_embd_norm")

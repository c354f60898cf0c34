"""hy_v3: Hunyuan 3. Norms of query and key heads come before the rotation. Dense layers first, then
experts that are chosen by sigmoid scores with a bias, and shared ones.
"""

from __future__ import annotations

from typing import Any

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("hy_v3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("neox"), router_spec(d, "sigmoid", norm=False)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    of_expert = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", of_expert)

    def feed_forward(layer: int) -> Any:
        # No key says which layers are dense.
        if not d.w.has(f"blk.{layer}.ffn_gate_inp.weight"):
            return d.ffn(layer, hidden[layer])
        return moe(d, layer, of_expert, router, shared=shared)

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope, head_norms=True), feed_forward(layer))

    return d.network(block)

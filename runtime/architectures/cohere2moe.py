"""cohere2moe: North Mini Code and Command A+. Attention side by side with experts, or with a dense
layer in leading blocks; most layers have a sliding window, and only these and dense ones rotate
heads. Where there are shared experts, what they give and what the others give is averaged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture

_PERIOD = 4  # every fourth layer is global, where no key says which are


@architecture("cohere2moe", gpu=True, layer_norm=None)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, router = d.p, d.rope("norm"), router_spec(d, "sigmoid", norm=False)
    # Arrays of files with blocks that predict further tokens may be for those, too.
    n_blocks = p.integer("block_count")
    hidden = p.per_layer("feed_forward_length", d.n_layers, n_blocks=n_blocks)
    of_expert = p.integer("expert_feed_forward_length")
    n_dense = p.integer("leading_dense_block_count", least=0)
    n_shared = p.integer("expert_shared_count", 0, least=0)
    shared = n_shared and p.integer("expert_shared_feed_forward_length", n_shared * of_expert)
    share = 0.5 if shared else 1.0
    router = replace(router, scale=share * router.scale)
    window = p.integer("attention.sliding_window")
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [(layer + 1) % _PERIOD != 0 for layer in range(d.n_layers)],
        n_blocks=n_blocks,
    )

    def feed_forward(layer: int) -> Any:
        if layer < n_dense:
            return d.ffn(layer, hidden[layer])
        return moe(d, layer, of_expert, router, shared=shared, shared_factor=share)

    def block(layer: int) -> Block:
        attention = d.attention(
            layer,
            rope if near[layer] or layer < n_dense else None,
            window=window if near[layer] else 0,
        )
        return d.parallel_block(layer, attention, feed_forward(layer))

    return d.network(block, logit_scale=p.number("logit_scale", 0.0, least=0) or 1.0)

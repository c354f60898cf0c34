"""cohere2: Command R7B and Command A. Attention and feed-forward side by side; of four layers three
have a sliding window, and only these rotate heads.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("cohere2", gpu=True, layer_norm=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("norm")
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    window = p.integer("attention.sliding_window")
    period = p.integer("attention.sliding_window_pattern", 4)

    def block(layer: int) -> Block:
        is_local = (layer + 1) % period != 0
        attention = d.attention(layer, rope if is_local else None, window=window if is_local else 0)
        return d.parallel_block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block, logit_scale=p.number("logit_scale", 0.0, least=0) or 1.0)

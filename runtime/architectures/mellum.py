"""mellum: Mellum 2. Qwen3's layers with experts; most have a window, and a rotation of their own,
while that of the others is scaled.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture
from .laguna import layer_ropes

_PERIOD = 4  # every fourth layer sees all, where no key says which do


@architecture("mellum", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, router = d.p, router_spec(d)
    hidden = p.integer("expert_feed_forward_length")
    window = p.integer("attention.sliding_window", 0, least=0)
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [(layer + 1) % _PERIOD != 0 for layer in range(d.n_layers)],
    )
    rope, near_rope = layer_ropes(d)

    def block(layer: int) -> Block:
        limited = bool(window) and near[layer]
        attention = d.attention(
            layer,
            near_rope if limited else rope,
            head_norms=True,
            window=window if limited else 0,
        )
        return d.block(layer, attention, moe(d, layer, hidden, router))

    return d.network(block)

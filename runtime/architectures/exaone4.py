"""exaone4: EXAONE 4.0. Norms follow attention and feed-forward, which read the stream as it is. If
layers have a sliding window, the others have no rotation.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_PERIOD = 4  # every fourth layer is global, where no key says which are


@architecture("exaone4", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("neox")
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    window = p.integer("attention.sliding_window", 0, least=0)
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [(layer + 1) % _PERIOD != 0 for layer in range(d.n_layers)],
    )

    def block(layer: int) -> Block:
        attention = d.attention(
            layer,
            rope if near[layer] or not window else None,
            head_norms=True,
            window=window if near[layer] else 0,
        )
        return d.block(
            layer,
            attention,
            d.ffn(layer, hidden[layer]),
            norms=(None, None),
            post_norms=("post_attention_norm", "post_ffw_norm"),
        )

    return d.network(block)

"""olmo2 (OLMo 2 and 3): norms after attention and feed-forward instead of before, norms of queries
and keys over all heads, and in OLMo 3 a sliding window in most layers.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.rope import Scaling
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_PERIOD = 4  # of layers with full attention, where the file has a window and does not say


@architecture("olmo2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, everywhere = d.p, d.rope("neox")
    window = p.integer("attention.sliding_window", 0, least=0)
    # Only layers that see all positions have scaled frequencies.
    base = p.number("rope.freq_base_swa", 0.0) or None
    nearby = d.rope("neox", base=base, scaling=Scaling("none"))
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    period = tuple((layer + 1) % _PERIOD != 0 for layer in range(d.n_layers))
    local = p.flags("attention.sliding_window_pattern", d.n_layers, period)

    def block(layer: int) -> Block:
        is_local = bool(window) and local[layer]
        attention = d.attention(
            layer,
            nearby if is_local else everywhere,
            joined_norms=True,
            window=window if is_local else 0,
        )
        return d.block(
            layer,
            attention,
            d.ffn(layer, hidden[layer]),
            norms=(None, None),
            post_norms=("post_attention_norm", "post_ffw_norm"),
        )

    return d.network(block)

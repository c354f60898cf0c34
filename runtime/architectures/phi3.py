"""phi3: Phi-3 and Phi-4. Query, key and value are one matrix, gate and up another.

Files for long contexts have two sets of frequency factors. As in llama.cpp, the size of the context
decides between them, not the number of tokens so far, so that keys in the cache stay right.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.rope import Rope, Scaling
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("phi3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = _rope(d), d.p.per_layer("feed_forward_length", d.n_layers)
    window = d.p.integer("attention.sliding_window", 0, least=0)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, window=window)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)


def _rope(d: Decoder) -> Rope:
    if not d.w.has("rope_factors_long.weight"):
        return d.rope("neox")
    p = d.p
    n_rot = p.integer("rope.dimension_count", d.key_length, most=d.key_length)
    scaling = Scaling("none", magnitude=p.number("rope.scaling.attn_factor", 1.0, above=0))
    short, long = (
        d.rope(
            "neox",
            n_rot=n_rot,
            factors=d.w.vector(f"rope_factors_{which}.weight", n_rot // 2),
            scaling=scaling,
        )
        for which in ("short", "long")
    )
    short.long = p.integer("rope.scaling.original_context_length"), long
    return short

"""stablelm: LayerNorms with biases, and a rotation of a part of each head. StableLM 2 12B has norms
of heads, and attention and feed-forward side by side.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("stablelm", gpu=True, layer_norm=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        at = f"blk.{layer}"
        head_norms = d.w.has(f"{at}.attn_q_norm.weight")
        attention = d.attention(layer, rope, head_norms=head_norms)
        ffn = d.ffn(layer, hidden[layer])
        # As in llama.cpp, the norm says it, and not the key.
        if d.w.has(f"{at}.ffn_norm.weight"):
            return d.block(layer, attention, ffn)
        return d.parallel_block(layer, attention, ffn)

    return d.network(block)

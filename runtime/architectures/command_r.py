"""command-r: Command R, Command R+ and Aya. Attention and feed-forward side by side; Command R+ has
norms of heads.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("command-r", gpu=True, layer_norm=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("norm"), d.p.per_layer("feed_forward_length", d.n_layers)

    def block(layer: int) -> Block:
        head_norms = d.w.has(f"blk.{layer}.attn_q_norm.weight")
        attention = d.attention(layer, rope, head_norms=head_norms)
        return d.parallel_block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block, logit_scale=d.p.number("logit_scale", 0.0, least=0) or 1.0)

"""phimoe: Phi-3.5-MoE. LayerNorms with biases, and experts whose weights are not shares of one:
each is that of a softmax over the logits near it. Files say the epsilon in the key of RMS norms.
"""

from __future__ import annotations

from dataclasses import replace

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.long_rope import any_rope
from ..network.network import Network
from . import architecture


@architecture("phimoe")
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    d, rope = replace(d, layer_norm=True), any_rope(d, "neox")
    router = replace(router_spec(d, norm=False), score="sparse_mixer")
    hidden = d.p.per_layer("feed_forward_length", d.n_layers)
    window = d.p.integer("attention.sliding_window", 0, least=0)

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, window=window)
        return d.block(layer, attention, moe(d, layer, hidden[layer], router))

    return d.network(block)

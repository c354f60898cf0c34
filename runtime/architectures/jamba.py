"""jamba: the first Mamba in most layers, for which there are no kernels, and attention without
rotations in others. Some layers have experts, whose weights are not normed.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from ..network.selective_parts import selective
from . import architecture


@architecture("jamba", hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    hidden = d.p.per_layer("feed_forward_length", d.n_layers)
    sparse = [d.w.has(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(d.n_layers)]
    router = router_spec(d, norm=False) if any(sparse) else None

    def block(layer: int) -> Block:
        n, attends = hidden[layer], d.kv_heads[layer] > 0
        mixer = d.attention(layer, None) if attends else selective(d, layer)
        if router is None or not sparse[layer]:
            return d.block(layer, mixer, d.ffn(layer, n))
        return d.block(layer, mixer, moe(d, layer, n, router))

    return d.network(block)

"""kimi-linear: Kimi-Linear-48B-A3B, Kimi delta attention in most layers and latent attention
without positions in the others, with experts and a shared one after the dense layers.
"""

from __future__ import annotations

from dataclasses import replace

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.kimi_delta_parts import kimi_delta
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture


@architecture("kimi-linear", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts = LatentParts.read(d, rotates=False)
    router = parts.router("sigmoid")
    if router is not None:
        router = replace(router, norm=True)  # there is no key for it

    def block(layer: int) -> Block:
        mixer = parts.attention(layer) if d.kv_heads[layer] else kimi_delta(d, layer)
        return d.block(layer, mixer, parts.ffn(layer, router))

    return d.network(block)

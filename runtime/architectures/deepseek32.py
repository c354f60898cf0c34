"""deepseek32: DeepSeek V3.2, which is V3 with attention to positions that an indexer in each layer
chooses.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture
from .deepseek2 import with_groups


@architecture("deepseek32", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts = LatentParts.read(d)
    router, attention = parts.router("sigmoid"), parts.chooses(range(d.n_layers), "neox")
    if router is not None:
        router = with_groups(router, d.p.has("expert_group_count"))

    def block(layer: int) -> Block:
        return d.block(layer, attention(layer), parts.ffn(layer, router))

    return d.network(block)

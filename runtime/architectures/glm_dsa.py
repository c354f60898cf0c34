"""glm-dsa: GLM-5. Latent attention to positions that an indexer chooses, experts as in DeepSeek-V3.

Some layers have an indexer, the others see the positions of the last layer that has one.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture

_SHARED_FROM = 1 << 20  # context from which on models without `indexer.types` share choices: 5.2


@architecture("glm-dsa", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts = LatentParts.read(d)
    router, attention = parts.router("sigmoid"), parts.chooses(_owners(d), "norm")

    def block(layer: int) -> Block:
        return d.block(layer, attention(layer), parts.ffn(layer, router))

    return d.network(block)


def _owners(d: Decoder) -> set[int]:
    """Return the layers that have an indexer. ConfigError if the first one has none."""
    layers, n_blocks = range(d.n_layers), d.p.integer("block_count")
    types = d.p.flags("attention.indexer.types", d.n_layers, None, n_blocks=n_blocks)
    if types is not None:
        found = {layer for layer in layers if types[layer]}
    elif d.p.integer("context_length", 0) >= _SHARED_FROM:
        found = {layer for layer in layers if layer < 2 or layer % 4 == 2}
    else:
        found = set(layers)
    if 0 not in found:
        raise ConfigError("the first layer has no indexer, and no layer before it", file=d.p.file)
    return found

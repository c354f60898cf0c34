"""hy_v4: Hy4. Several residual streams that keep what they are; latent attention with sinks and a
gate for each element, to positions that an indexer chooses, whose last elements are rotated; a
dense layer first, then experts with a shared one, which alone is not limited.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import limited
from ..network.latent_parts import LatentParts
from ..network.network import Network
from ..network.stream_parts import StreamParts
from . import architecture


@architecture("hy_v4")
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts, streams = LatentParts.read(d, element_gates=True), StreamParts.read(d, keeping=True)
    router, limits = parts.router("sigmoid"), limited(d, "silu")
    attention = parts.chooses(_owners(d), "norm", rope_last=True, key_eps=d.eps)

    def block(layer: int) -> Block:
        ffn = parts.ffn(layer, router, **limits(layer))
        return d.block(layer, attention(layer), ffn, streams=streams.around(layer))

    return d.network(block, streams=streams.ends())


def _owners(d: Decoder) -> set[int]:
    """Return the layers that have an indexer. ConfigError if the first one has none."""
    n_blocks = d.p.integer("block_count")
    types = d.p.flags("attention.indexer.types", d.n_layers, None, n_blocks=n_blocks)
    found = {layer for layer in range(d.n_layers) if types is None or types[layer]}
    if 0 not in found:
        raise ConfigError("the first layer has no indexer, and no layer before it", file=d.p.file)
    return found

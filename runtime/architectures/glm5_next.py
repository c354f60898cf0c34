"""glm5-next: GLM-5.3-Flash. Four residual streams; Kimi delta attention with bounded decays in most
layers, and in the others latent attention without rotation to pools of positions that an indexer
chooses; experts with a shared one after the dense layers, which all limit what they multiply.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import limited
from ..network.kimi_delta_parts import kimi_delta
from ..network.latent_parts import LatentParts
from ..network.network import Network
from ..network.stream_parts import StreamParts
from . import architecture


@architecture("glm5-next", hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts, streams = LatentParts.read(d, rotates=False, eps=d.eps), StreamParts.read(d)
    router, limits = parts.router("sigmoid"), limited(d, "silu")
    attention = parts.chooses(_owners(d), "norm", pools=True)

    def block(layer: int) -> Block:
        mixer = attention(layer) if d.kv_heads[layer] else kimi_delta(d, layer, rate_columns=False)
        ffn = parts.ffn(layer, router, **limits(layer))
        return d.block(layer, mixer, ffn, streams=streams.around(layer))

    return d.network(block, streams=streams.ends(mean=True))


def _owners(d: Decoder) -> set[int]:
    """Return the layers that have an indexer. ConfigError if the first one that needs one has
    none.
    """
    n_blocks = d.p.integer("block_count")
    types = d.p.flags("attention.indexer.types", d.n_layers, None, n_blocks=n_blocks)
    latent = [layer for layer in range(d.n_layers) if d.kv_heads[layer]]
    found = {layer for layer in latent if types is None or types[layer]}
    if latent and latent[0] not in found:
        raise ConfigError(
            f"layer {latent[0]} has no indexer, and no layer before it", file=d.p.file
        )
    return found

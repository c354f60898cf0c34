"""bailingmoe3: Ling 3.0, Kimi delta attention with bounded decays in most layers and latent
attention with a gate for each head in the others, with experts in groups and a shared one after the
dense layers. Some layers limit what their experts multiply.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import limited
from ..network.kimi_delta_parts import kimi_delta
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture


@architecture("bailingmoe3", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    parts = LatentParts.read(d)
    router = parts.router("sigmoid")
    limits = limited(d, "capped_silu")

    def block(layer: int) -> Block:
        mixer = parts.attention(layer) if d.kv_heads[layer] else kimi_delta(d, layer)
        return d.block(layer, mixer, parts.ffn(layer, router, **limits(layer)))

    return d.network(block)

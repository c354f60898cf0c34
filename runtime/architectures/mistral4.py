"""mistral4: Mistral Small 4. DeepSeek's latent attention, with queries that grow with the position,
and experts in every layer whose gate and up are stored merged.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import Temperature
from ..network.decoder import Decoder
from ..network.latent_parts import LatentParts
from ..network.network import Network
from . import architecture

_TEMPERATURE = 0.1  # of the released models; converters write no key for it


@architecture("mistral4", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    scale = d.p.number("attention.temperature_scale", _TEMPERATURE)
    context = d.p.integer("rope.scaling.original_context_length", 0)
    parts = LatentParts.read(d, Temperature(scale, context) if scale and context else None)
    router = parts.router("softmax")

    def block(layer: int) -> Block:
        return d.block(layer, parts.attention(layer), parts.ffn(layer, router))

    return d.network(block)

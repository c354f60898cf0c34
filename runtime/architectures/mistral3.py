"""mistral3: Ministral 3 and Devstral 2. Layers of Llama, YaRN without its magnitude, and a
temperature of queries.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.rope import Scaling
from ..layers.specs import Temperature
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("mistral3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p = d.p
    rope = d.rope("norm", scaling=Scaling.read(p, own_magnitude=False))
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    scale = p.number("attention.temperature_scale", 0.0)
    original = p.integer("rope.scaling.original_context_length", 0, least=0)
    temperature = Temperature(scale, original) if scale and original else None

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, temperature=temperature)
        return d.block(layer, attention, d.ffn(layer, hidden[layer]))

    return d.network(block)

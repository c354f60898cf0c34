"""llama4: Llama 4. Three of four layers rotate, norm heads without weights and see a chunk of the
text; every fourth sees all of it and has no rotation, but a temperature of queries. The sigmoid
score of an expert multiplies what it reads.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Block
from ..layers.specs import Temperature
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture

# No keys say these.
CHUNK = 8192
_PERIOD = 4
_TEMPERATURE = 0.1
_PLAIN_EXPERTS = 128  # Maverick's, which has no norms of heads


@architecture("llama4", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise ConfigError for a
    file with other windows, and the errors of `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("norm")
    if p.has("attention.sliding_window"):
        raise ConfigError(
            "metadata key 'llama4.attention.sliding_window' is there; only models with the chunks"
            " of Llama 4 are supported",
            file=p.file,
        )
    router = router_spec(d, "sigmoid", norm=False, on_input=True)
    normed = router.n_experts != _PLAIN_EXPERTS
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    interval = p.integer("interleave_moe_layer_step")
    of_expert = p.integer("expert_feed_forward_length")

    def block(layer: int) -> Block:
        if (layer + 1) % _PERIOD == 0:
            heat = Temperature(_TEMPERATURE, CHUNK, offset=1)
            attention = d.attention(layer, None, temperature=heat)
        else:
            attention = d.attention(
                layer, rope, plain_head_norms=normed, norms_last=normed, window=CHUNK, chunked=True
            )
        ffn = (
            d.ffn(layer, hidden[layer])
            if (layer + 1) % interval
            else moe(d, layer, of_expert, router, shared=of_expert)
        )
        return d.block(layer, attention, ffn)

    return d.network(block)

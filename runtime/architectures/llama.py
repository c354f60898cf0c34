"""llama: Llama 2, 3 and 3.1, Mistral, and with experts Mixtral.

The rotation takes adjacent pairs; converters reorder the rows of the query and key matrices for
that. The context scaling of Llama 3.1 is stored as frequency factors in `rope_freqs`.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("llama", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p = d.p
    # Of Granite models, which early converters wrote as llama.
    for key in ("logit_scale", "embedding_scale", "residual_scale", "attention.scale"):
        p.refuse(key, harmless=(0.0, 1.0))
    if (n_rot := p.integer("rope.dimension_count", d.key_length)) != d.key_length:
        raise ConfigError(
            f"metadata key 'llama.rope.dimension_count' is {n_rot}, expected the head size"
            f" {d.key_length}",
            file=p.file,
        )
    rope = d.rope("norm")
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    router = None
    if p.integer("expert_count", 0, least=0):
        router = router_spec(d)
        hidden = p.per_layer("expert_feed_forward_length", d.n_layers, hidden)

    def block(layer: int) -> Block:
        n = hidden[layer]
        ffn = d.ffn(layer, n) if router is None else moe(d, layer, n, router)
        return d.block(layer, d.attention(layer, rope), ffn)

    return d.network(block)

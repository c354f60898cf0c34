"""minicpm, minicpm3: MiniCPM, MiniCPM4 and MiniCPM3. Factors of embeddings, of what layers add,
and of logits; in MiniCPM3 latent attention.

With a factor s of what layers add, the residual stream is divided by s, and the epsilon of its
norms by s^2, as in `granite.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.latent_parts import LatentParts
from ..network.long_rope import any_rope
from ..network.network import Network
from . import architecture

# Those of MiniCPM 1B and 2B, of which early files have no keys for them, and of MiniCPM3, of which
# no file has any.
_EMBEDDED, _DEPTH, _BASE_WIDTH = 12.0, 1.4, 256.0


@architecture("minicpm", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p = d.p
    added = p.number("residual_scale", _DEPTH / d.n_layers**0.5, above=0)
    embedded = p.number("embedding_scale", _EMBEDDED, above=0)
    divisor = p.number("logit_scale", d.width / _BASE_WIDTH, above=0)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    rope, d = any_rope(d, "norm"), replace(d, eps=d.eps / added**2)

    def block(layer: int) -> Block:
        return d.block(layer, d.attention(layer, rope), d.ffn(layer, hidden[layer]))

    return d.network(block, embedding_scale=embedded / added, logit_scale=1 / divisor)


@architecture("minicpm3", gpu=True)
def build_latent(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    added = _DEPTH / d.n_layers**0.5
    rope, d = any_rope(d, "neox"), replace(d, eps=d.eps / added**2)
    parts = LatentParts.read(d, rope=rope)

    def block(layer: int) -> Block:
        return d.block(layer, parts.attention(layer), parts.ffn(layer, None))

    return d.network(block, embedding_scale=_EMBEDDED / added, logit_scale=_BASE_WIDTH / d.width)

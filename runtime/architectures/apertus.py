"""apertus: norms of query and key heads, and feed-forward layers with xIELU and no gate."""

from __future__ import annotations

import math

from ..layers.block import Block
from ..layers.specs import FFNSpec, Xielu
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture


@architecture("apertus", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    rope, hidden = d.rope("neox"), d.p.per_layer("feed_forward_length", d.n_layers)
    alpha_p, alpha_n, beta, eps = (
        d.p.numbers(f"xielu.{name}", d.n_layers, least=None, prefixed=False)
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    )

    def block(layer: int) -> Block:
        # Files have the alphas as they are learned: their softplus counts.
        numbers = Xielu(
            _softplus(alpha_p[layer]),
            beta[layer] + _softplus(alpha_n[layer]),
            beta[layer],
            eps[layer],
        )
        spec = FFNSpec("xielu", gated=False, xielu=numbers)
        attention = d.attention(layer, rope, head_norms=True)
        return d.block(layer, attention, d.ffn(layer, hidden[layer], spec))

    return d.network(block)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))

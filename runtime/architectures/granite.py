"""granite, granitemoe, granitehybrid: Llama's layers with factors of embeddings, of what layers
add, of scores and of logits. With experts there may be a shared one. In the third most layers have
Mamba-2 instead of attention.

With a factor s of what layers add, the residual stream is h = m e + s (y1 + y2 + ...). Here it is
h / s instead, so that layers add what they give. RMS norms are the same of both, if the epsilon is
divided by s^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from ..network.state_space_parts import state_space
from . import architecture


@architecture("granite", "granitemoe", gpu=True)
@architecture("granitehybrid", gpu=True, hybrid=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    # Of models without positions; the key means something else for other architectures.
    rope = d.rope("norm") if d.p.flag("rope.scaling.finetuned", True) else None

    def mixer(scaled: Decoder, layer: int, scale: float | None) -> Any:
        if not d.kv_heads[layer]:
            return state_space(d, layer)  # whose own norms have the epsilon of the file
        return scaled.attention(layer, rope, scale=scale)

    return scaled_network(d, mixer)


def scaled_network(d: Decoder, mixer: Callable[[Decoder, int, float | None], Any]) -> Network:
    """Return the network whose layers have the mixer that `mixer` builds, from the decoder with the
    epsilon of the divided stream, the number of the layer, and the scale of scores (None: the usual
    one). Raise the errors of `Decoder`.
    """
    p = d.p
    # A factor of 0 means that there is none.
    added = p.number("residual_scale", 0.0, least=0) or 1.0
    embedded = p.number("embedding_scale", 0.0, least=0) or 1.0
    scale = p.number("attention.scale", 0.0, least=0) or None
    d = replace(d, eps=d.eps / added**2)
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    router, shared = None, 0
    if p.integer("expert_count", 0, least=0):
        router = router_spec(d)
        shared = p.integer("expert_shared_feed_forward_length", 0, least=0)

    def block(layer: int) -> Block:
        n = hidden[layer]
        ffn = d.ffn(layer, n) if router is None else moe(d, layer, n, router, shared=shared)
        return d.block(layer, mixer(d, layer, scale), ffn)

    return d.network(
        block,
        embedding_scale=embedded / added,
        logit_scale=1 / p.number("logit_scale", above=0),
    )

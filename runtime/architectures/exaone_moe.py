"""exaone-moe: K-EXAONE. Three of four layers have a window and a rotation, the others neither.
Dense layers first, then experts that are chosen by sigmoid scores with a bias, and shared ones.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from . import architecture

_PERIOD = 4  # every fourth layer is global, where no key says which are


@architecture("exaone-moe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("neox")
    ffn = dense_then_experts(d, router_spec(d, "sigmoid", norm=False))
    window = p.integer("attention.sliding_window")
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [(layer + 1) % _PERIOD != 0 for layer in range(d.n_layers)],
        n_blocks=p.integer("block_count"),
    )

    def block(layer: int) -> Block:
        attention = d.attention(
            layer,
            rope if near[layer] else None,
            head_norms=True,
            window=window if near[layer] else 0,
        )
        return d.block(layer, attention, ffn(layer))

    return d.network(block)

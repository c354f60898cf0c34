"""afmoe: Arcee's Trinity. Attention whose results are gated, with a window and a rotation in three
of four layers and neither in every fourth; norms before and after both halves of a block; dense
layers first, then experts that are chosen by sigmoid scores with a bias, and shared ones.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import dense_then_experts, router_spec
from ..network.network import Network
from . import architecture

_PERIOD = 4  # every fourth layer is global, where no key says which are


@architecture("afmoe", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope = d.p, d.rope("neox")
    ffn = dense_then_experts(d, router_spec(d, "sigmoid", norm=False))
    window = p.integer("attention.sliding_window", 0, least=0)
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [(layer + 1) % _PERIOD != 0 for layer in range(d.n_layers)],
    )

    def block(layer: int) -> Block:
        attention = d.attention(
            layer,
            rope if near[layer] else None,
            head_norms=True,
            gate=True,
            gate_apart=True,
            window=window if near[layer] else 0,
        )
        return d.block(
            layer, attention, ffn(layer), post_norms=("post_attention_norm", "post_ffw_norm")
        )

    return d.network(block, embedding_scale=d.width**0.5)

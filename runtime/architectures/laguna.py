"""laguna: Laguna XS.2, S-2.1 and M.1. Layers with a window may have more heads, and have a rotation
of their own; that of the others is scaled. The softplus of gates multiplies the results of heads,
or of their elements. Dense layers first, then experts that are chosen by sigmoid scores with a
bias, and a shared one.
"""

from __future__ import annotations

from typing import Any

from ..layers.block import Block
from ..layers.rope import Rope, Scaling
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture

_PERIOD = 4  # every fourth layer from the first on sees all, where no key says which do


@architecture("laguna", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, router = d.p, router_spec(d, "sigmoid", norm=False)
    n_dense = p.integer("leading_dense_block_count", least=0)
    hidden = p.per_layer("feed_forward_length", d.n_layers) if n_dense else ()
    of_expert = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", of_expert)
    window = p.integer("attention.sliding_window", 0, least=0)
    near = p.flags(
        "attention.sliding_window_pattern",
        d.n_layers,
        [layer % _PERIOD != 0 for layer in range(d.n_layers)],
    )
    rope, near_rope = layer_ropes(d)

    def feed_forward(layer: int) -> Any:
        if layer < n_dense:
            return d.ffn(layer, hidden[layer])
        return moe(d, layer, of_expert, router, shared=shared)

    def block(layer: int) -> Block:
        gates = d.w.n_rows_of(f"blk.{layer}.attn_gate.weight")
        attention = d.attention(
            layer,
            near_rope if window and near[layer] else rope,
            head_norms=True,
            window=window if near[layer] else 0,
            gate=True,
            gate_apart=True,
            head_gates=gates == d.heads[layer],
            softplus_gates=True,
        )
        return d.block(layer, attention, feed_forward(layer))

    return d.network(block)


def layer_ropes(d: Decoder) -> tuple[Rope, Rope]:
    """Return the rotation of layers that see all positions, and that of layers with a window, which
    is not scaled.
    """
    p, rope = d.p, d.rope("neox", own_factors=False)
    near = d.rope(
        "neox",
        n_rot=p.integer("rope.dimension_count_swa", rope.n_rot, most=d.key_length),
        base=p.number("rope.freq_base_swa", p.number("rope.freq_base", 10000.0), above=1),
        own_factors=False,
        scaling=Scaling(),
    )
    return rope, near

"""step35: Step-3.5-Flash. Layers with a window have more heads, which are rotated whole and by
another base; half of a head is rotated in the others. Heads have a gate each. Dense layers first,
then experts that are chosen by sigmoid scores with a bias, and a shared one. Some layers limit what
their experts multiply.
"""

from __future__ import annotations

from typing import Any

from ..layers.block import Block
from ..layers.rope import Rope
from ..network.decoder import Decoder
from ..network.expert_parts import limited, moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("step35", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, router = d.p, router_spec(d, "sigmoid", norm=False)
    rope, near_rope = _ropes(d)
    # Arrays of files with blocks that predict further tokens are for those, too.
    n_blocks = p.integer("block_count")
    hidden = p.per_layer("feed_forward_length", d.n_layers, n_blocks=n_blocks)
    of_expert = p.per_layer("expert_feed_forward_length", d.n_layers, n_blocks=n_blocks)
    shared = p.integer("expert_shared_feed_forward_length", 0, least=0)
    window = p.integer("attention.sliding_window")
    near = p.flags("attention.sliding_window_pattern", d.n_layers, n_blocks=n_blocks)
    limits = limited(d, "capped_silu")

    def feed_forward(layer: int) -> Any:
        specs = limits(layer)
        if not d.w.has(f"blk.{layer}.ffn_gate_inp.weight"):
            return d.ffn(layer, hidden[layer], specs["shared_ffn"])
        ffn, always = specs["ffn"], specs["shared_ffn"]
        return moe(d, layer, of_expert[layer], router, ffn=ffn, shared=shared, shared_ffn=always)

    def block(layer: int) -> Block:
        gate = d.w.has(f"blk.{layer}.attn_gate.weight")
        attention = d.attention(
            layer,
            near_rope if near[layer] else rope,
            head_norms=True,
            window=window if near[layer] else 0,
            gate=gate,
            gate_apart=gate,
            head_gates=gate,
        )
        return d.block(layer, attention, feed_forward(layer))

    return d.network(block)


def _ropes(d: Decoder) -> tuple[Rope, Rope]:
    """Return the rotation of layers without a window, and that of layers with one, which takes
    no factors.
    """
    p = d.p
    n_rot = p.integer("rope.dimension_count", d.key_length, most=d.key_length)
    base = p.number("rope.freq_base", 10000.0, above=1)
    factors = d.w.optional_vector("rope_freqs.weight", n_rot // 2)
    return (
        d.rope(
            "neox",
            n_rot=n_rot // 2,
            factors=None if factors is None else factors[: n_rot // 4],
            own_factors=False,
        ),
        d.rope(
            "neox",
            n_rot=n_rot,
            base=p.number("rope.freq_base_swa", base, above=1),
            own_factors=False,
        ),
    )

"""mimo2: MiMo-V2-Flash. Layers with a window have sinks, more heads of keys and values and another
base of the rotation. Values are scaled. Experts are chosen by sigmoid scores with a bias.
"""

from __future__ import annotations

from ..layers.block import Block
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture


@architecture("mimo2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, router = d.p, router_spec(d, "sigmoid")
    rope = d.rope("neox")
    near_rope = d.rope("neox", base=p.number("rope.freq_base_swa", 10000.0, above=1))
    # Arrays of files with blocks that predict further tokens are for those, too.
    n_blocks = p.integer("block_count")
    hidden = p.per_layer("feed_forward_length", d.n_layers, n_blocks=n_blocks)
    of_expert = p.integer("expert_feed_forward_length")
    window = p.integer("attention.sliding_window")
    near = p.flags("attention.sliding_window_pattern", d.n_layers, n_blocks=n_blocks)
    value_scale = p.number("attention.value_scale", 0.0) or 1.0

    def block(layer: int) -> Block:
        at = f"blk.{layer}"
        attention = d.attention(
            layer,
            near_rope if near[layer] else rope,
            window=window if near[layer] else 0,
            sinks=d.w.has(f"{at}.attn_sinks.weight"),
            result_scale=value_scale,
        )
        ffn = (
            moe(d, layer, of_expert, router)
            if d.w.has(f"{at}.ffn_gate_inp.weight")
            else d.ffn(layer, hidden[layer])
        )
        return d.block(layer, attention, ffn)

    return d.network(block)

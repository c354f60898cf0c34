"""gemma3: Gemma 3. Five layers with a sliding window to one without; these have a rotation of their
own.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.rope import Scaling
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_LAYERS_27B = 62  # whose queries are scaled by width / heads, where others have the head size


@architecture("gemma3", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, everywhere, spec = d.p, d.rope("neox"), FFNSpec("gelu")
    nearby = d.rope(
        "neox", base=p.number("rope.freq_base_swa", 10000.0, above=1), scaling=Scaling("none")
    )
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    window = p.integer("attention.sliding_window")
    period = p.integer("attention.sliding_window_pattern", 6)
    divisor = d.width / d.heads[0] if d.n_layers == _LAYERS_27B else d.key_length

    def block(layer: int) -> Block:
        is_global = (layer + 1) % period == 0
        attention = d.attention(
            layer,
            everywhere if is_global else nearby,
            head_norms=True,
            scale=divisor**-0.5,
            window=0 if is_global else window,
        )
        return d.block(
            layer,
            attention,
            d.ffn(layer, hidden[layer], spec),
            post_norms=("post_attention_norm", "post_ffw_norm"),
        )

    return d.network(
        block,
        embedding_scale=d.width**0.5,
        softcap=p.number("final_logit_softcapping", 0.0),
    )

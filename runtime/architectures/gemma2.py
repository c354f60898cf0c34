"""gemma2: norms before and after both halves of a block, capped scores and logits, and a sliding
window in every other layer.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.network import Network
from . import architecture

_LAYERS_27B = 46  # whose queries are scaled by width / heads, where others have the head size


@architecture("gemma2", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, spec = d.p, d.rope("neox"), FFNSpec("gelu")
    hidden = p.per_layer("feed_forward_length", d.n_layers)
    window = p.integer("attention.sliding_window", 4096)
    divisor = d.width / d.heads[0] if d.n_layers == _LAYERS_27B else d.key_length
    softcap = p.number("attn_logit_softcapping", 50.0)

    def block(layer: int) -> Block:
        attention = d.attention(
            layer,
            rope,
            scale=divisor**-0.5,
            softcap=softcap,
            window=window if layer % 2 == 0 else 0,
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
        softcap=p.number("final_logit_softcapping", 30.0),
    )

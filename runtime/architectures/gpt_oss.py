"""gpt-oss: attention with sinks and biases, a sliding window in every other layer, and experts with
biases and a clamped activation.
"""

from __future__ import annotations

from ..layers.block import Block
from ..layers.rope import Scaling
from ..layers.specs import FFNSpec
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from . import architecture

_LIMIT = 7.0  # of the activation; there is no key for it


@architecture("gpt-oss", gpu=True)
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, spec = d.p, FFNSpec("swiglu_oai", limit=_LIMIT)
    # The released models interpolate without rounding YaRN's correction range.
    rope = d.rope("neox", scaling=Scaling.read(p, truncate=False))
    router = router_spec(d, "selected", norm=False)
    hidden = p.integer("expert_feed_forward_length")
    window = p.integer("attention.sliding_window")

    def block(layer: int) -> Block:
        attention = d.attention(layer, rope, sinks=True, window=window if layer % 2 == 0 else 0)
        return d.block(
            layer,
            attention,
            moe(d, layer, hidden, router, ffn=spec),
            norms=("attn_norm", "post_attention_norm"),
        )

    return d.network(block)

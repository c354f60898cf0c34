"""qwen3moe: Qwen3 with experts in every layer.

Query and key heads are normalized before the rotation, whose pairs are half a head apart. The head
size is a separate key.
"""

from __future__ import annotations

from ..decoder import Decoder
from ..hyperparameters import Hyperparameters
from ..layers.attention import Attention
from ..layers.block import Block
from ..layers.moe import MoE
from ..network import Network
from ..weights import Weights
from . import architecture


@architecture("qwen3moe", layers=(Attention, MoE))
def build(p: Hyperparameters, w: Weights) -> Network:
    decoder = Decoder.read(p, w)
    decoder.refuse_unknown_routing()
    rope = decoder.rope("neox")
    hidden = p.integer("expert_feed_forward_length")

    def block(layer: int) -> Block:
        at = f"blk.{layer}"
        return Block(
            decoder.norm(f"{at}.attn_norm"),
            decoder.attention(layer, rope, head_norms=True),
            decoder.norm(f"{at}.ffn_norm"),
            decoder.moe(layer, hidden),
        )

    return decoder.network([block(layer) for layer in range(decoder.n_layers)])

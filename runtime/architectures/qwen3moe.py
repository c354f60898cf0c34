"""qwen3moe: Qwen3 with experts in every layer.

Query and key heads are normalised before the rotation, whose pairs lie half a head apart; the head
size is a key of its own.
"""

from __future__ import annotations

from ..decoder import Decoder
from ..hyperparameters import Hyperparameters
from ..layers.block import Block
from ..network import Network, architecture
from ..weights import Weights


@architecture("qwen3moe")
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

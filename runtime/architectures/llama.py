"""llama: Llama 2, 3 and 3.1, Mistral, and with experts Mixtral.

The rotation takes adjacent pairs; converters reorder the rows of the query and key matrices for
that. The context scaling of Llama 3.1 is stored as frequency factors in `rope_freqs`.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..decoder import Decoder
from ..hyperparameters import Hyperparameters
from ..layers.attention import Attention
from ..layers.block import Block
from ..layers.ffn import GatedFFN
from ..layers.moe import MoE
from ..network import Network
from ..weights import Weights
from . import architecture


@architecture("llama", layers=(Attention, GatedFFN, MoE))
def build(p: Hyperparameters, w: Weights) -> Network:
    decoder = Decoder.read(p, w)
    # Of Granite models, which early converters wrote as llama.
    for key in (
        "logit_scale",
        "embedding_scale",
        "residual_scale",
        "attention.scale",
    ):
        p.refuse(key, harmless=(0.0, 1.0))
    n_rot = p.integer("rope.dimension_count", decoder.key_length)
    if n_rot != decoder.key_length:
        raise ConfigError(
            f"metadata key 'llama.rope.dimension_count' is {n_rot}, expected the head size"
            f" {decoder.key_length}",
            file=p.file,
        )
    rope = decoder.rope("norm")
    hidden = p.per_layer("feed_forward_length", decoder.n_layers)
    has_experts = p.integer("expert_count", 0, least=0) > 0
    if has_experts:
        decoder.refuse_unknown_routing()
        hidden = p.per_layer("expert_feed_forward_length", decoder.n_layers, hidden)

    def block(layer: int) -> Block:
        at = f"blk.{layer}"
        ffn = (
            decoder.moe(layer, hidden[layer]) if has_experts else decoder.ffn(layer, hidden[layer])
        )
        return Block(
            decoder.norm(f"{at}.attn_norm"),
            decoder.attention(layer, rope),
            decoder.norm(f"{at}.ffn_norm"),
            ffn,
        )

    return decoder.network([block(layer) for layer in range(decoder.n_layers)])

"""deepseek4: DeepSeek V4. Keys, which are values as well, of near positions, and entries for runs
of positions before; several residual streams; experts with a shared one, which the token chooses in
the first layers.
"""

from __future__ import annotations

from typing import Any

from ..layers.block import Block
from ..layers.layer_input import TokenIds
from ..layers.specs import FFNSpec
from ..network.compressed_parts import CompressedParts
from ..network.decoder import Decoder
from ..network.expert_parts import moe, router_spec
from ..network.network import Network
from ..network.stream_parts import StreamParts
from . import architecture

_NO_LIMIT = 1e-6  # llama.cpp takes limits that are not above it for none


@architecture("deepseek4")
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, w, n_blocks = d.p, d.w, d.p.integer("block_count")
    parts, streams, router = CompressedParts.read(d), StreamParts.read(d), router_spec(d)
    hidden = p.per_layer("expert_feed_forward_length", d.n_layers, n_blocks=n_blocks)
    shared = p.integer("expert_shared_count", least=0, most=1024)
    n_by_token = p.integer("hash_layer_count", least=0)
    limits = p.numbers("swiglu_clamp_exp", d.n_layers, n_blocks=n_blocks)
    shared_limits = limits
    if p.has("swiglu_clamp_shexp"):
        shared_limits = p.numbers("swiglu_clamp_shexp", d.n_layers, n_blocks=n_blocks)
    n_vocab = p.integer("vocab_size", w.n_rows_of("token_embd.weight"))

    def feed_forward(layer: int) -> Any:
        table, at = None, f"blk.{layer}"
        if layer < n_by_token:
            shape = n_vocab, router.n_used
            table = w.numbers(f"{at}.ffn_gate_tid2eid.weight", shape, router.n_experts)
        w.skip(f"{at}.exp_probs_b_vl.")  # for tokens of images
        return moe(
            d,
            layer,
            hidden[layer],
            router,
            ffn=_limited(limits[layer]),
            shared=shared * hidden[layer],
            shared_ffn=_limited(shared_limits[layer]),
            table=table,
        )

    def block(layer: int) -> Block:
        return d.block(
            layer, parts.attention(layer), feed_forward(layer), streams=streams.around(layer)
        )

    return d.network(block, inputs=TokenIds() if n_by_token else None, streams=streams.ends())


def _limited(limit: float) -> FFNSpec:
    return FFNSpec(limit=limit if limit > _NO_LIMIT else 0.0)

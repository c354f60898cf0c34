"""qwen4exp: Qwen3.8-Flash-Next. Several residual streams; gated delta nets, and in every fourth
layer gated attention to blocks of positions that an indexer chooses; experts with a gated shared
one; one layer adds embeddings of n-grams.

Positions of text are the same for time, height and width, so that the rotation by sections is the
plain one.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ..layers.attention import Attention
from ..layers.block import Block
from ..layers.chosen.attention import BlockAttention
from ..layers.chosen.indexer import BlockIndexer
from ..layers.layer_input import TokenIds
from ..layers.rope import Rope
from ..layers.specs import IndexerSpec
from ..network.decoder import Decoder
from ..network.delta_net_parts import delta_net, recurrent_layers
from ..network.expert_parts import moe, router_spec
from ..network.gated_stream_parts import GatedStreamParts
from ..network.network import Network
from ..network.ngram_parts import ngram_branches
from . import architecture


@architecture("qwen4exp")
def build(d: Decoder) -> Network:
    """Return the network that the weights and metadata of `d` describe. Raise the errors of
    `Decoder`, which name file and key or tensor.
    """
    p, rope, streams = d.p, d.rope("neox"), GatedStreamParts.read(d)
    recurrent, router = recurrent_layers(d), router_spec(d)
    hidden = p.integer("expert_feed_forward_length")
    shared = p.integer("expert_shared_feed_forward_length", 0, least=0)
    blocks = p.at_least_per_layer("attention.compress_ratios", d.n_layers)
    ngrams = ngram_branches(d, streams)

    def block(layer: int) -> Block:
        mixer = (
            delta_net(d, layer, sigmoid=True)
            if recurrent[layer]
            else _attention(d, layer, rope, blocks[layer])
        )
        return d.block(
            layer,
            mixer,
            moe(d, layer, hidden, router, shared=shared),
            norms=(None, None),
            first=ngrams.get(layer, ()),
            streams=streams.around(layer),
        )

    inputs = TokenIds() if ngrams else None
    return d.network(block, last_norm=None, streams=streams.ends(), inputs=inputs)


def _attention(d: Decoder, layer: int, rope: Rope, block: int) -> Any:
    """Attention of a layer with `indexer.*`. ConfigError for an indexer without blocks."""
    p, w, at = d.p, d.w, f"blk.{layer}.indexer"
    if block < 1:
        raise ConfigError(
            f"metadata key '{p.architecture}.attention.compress_ratios' has {block} for layer"
            f" {layer}, which has attention",
            file=p.file,
        )
    made = d.attention(layer, rope, head_norms=True, gate=True)
    if not isinstance(made, Attention):
        return made
    spec = IndexerSpec(
        p.integer("attention.indexer.head_count"),
        p.integer("attention.indexer.key_length", least=rope.n_rot),
        rope.n_rot,
        p.integer("attention.indexer.top_k", least=block),
    )
    length = spec.key_length
    q, k = (
        w.linear(
            f"{at}.{part}_proj", d.width, n_out, role=f"indexer.{part}_proj", split="replicated"
        )
        for part, n_out in (("q", spec.heads * length), ("k", length))
    )
    q_norm, k_norm = (d.rms_norm(f"{at}.{part}_norm", length) for part in "qk")
    return BlockAttention(
        made, BlockIndexer(spec, block, q=q, k=k, q_norm=q_norm, k_norm=k_norm, rope=rope)
    )

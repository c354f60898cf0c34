"""The shape of a model, for random weights: its sizes, tensors and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...formats.ftypes import FILE_TYPES
from ...formats.tensor_names import OUTPUT, TOKEN_EMBEDDING
from ...formats.types import GGMLType
from ...formats.values import Value, f32, string, u32
from .mixer_sizes import DeltaSizes, IndexerSizes, LatentSizes

QKV = ("attn_q", "attn_k", "attn_v")  # matrices with a bias in many models


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    n_dense: so many first layers have no experts, but a feed-forward layer of `dense_hidden`, and
    after these all but every `interval`th.
    shared: hidden size of the expert that works on every token, with `shared_gate` multiplied by a
    gate. merged: gate and up of experts are one matrix. gate: gates after attention, in the query
    matrix or, with gate_apart, in one of their own; with head_gates one of each head. value_head:
    elements of a head of values (0: as many as of keys). delta: layers
    of which most have a delta net instead of attention.
    rotated: elements of a head that are rotated; 0 for all. attn_norm, ffn_norm: names of the norms
    before the halves of a block. last_norm: that of the norm before the output.
    post_norms: norms after both halves of a block. latent: its attention is latent attention, with
    `indexer` to chosen positions. joined: query, key and value are one matrix, gate and up another.
    joined_heads: only query, key and value are; joined_gate_up: only gate and up.
    joined_norms: norms of queries and keys are over all heads. long_rope: two sets of frequency
    factors. layer_norm: norms are LayerNorms, with biases if `norm_biases`. side_by_side: attention
    and feed-forward read the same norm. gated: whether
    feed-forward layers have a gate. scaled_by_norms: scores of attention have no scale, so that the
    norms of heads keep them small. keys: further keys. bare_keys: those that do not follow the
    architecture's name.
    """

    architecture: str
    name: str
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    head: int
    hidden: int
    n_vocab: int
    rope_base: float
    context: int
    eps: float
    n_experts: int = 0
    n_used: int = 0
    llama3_rope: bool = False
    n_dense: int = 0
    dense_hidden: int = 0
    shared: int = 0
    shared_gate: bool = False
    merged: bool = False
    gate: bool = False
    gate_apart: bool = False
    head_gates: bool = False
    value_head: int = 0
    delta: DeltaSizes | None = None
    rotated: int = 0
    head_norms: bool = False
    joined_norms: bool = False
    biases: tuple[str, ...] = ()
    sinks: bool = False
    choice_bias: bool = False
    choice_bias_name: str = "exp_probs_b.bias"
    attn_norm: str = "attn_norm"
    ffn_norm: str = "ffn_norm"
    last_norm: str = "output_norm"
    post_norms: tuple[str, str] | None = None
    tied: bool = False
    latent: LatentSizes | None = None
    indexer: IndexerSizes | None = None
    joined: bool = False
    joined_heads: bool = False
    joined_gate_up: bool = False
    long_rope: bool = False
    layer_norm: bool = False
    norm_biases: bool = True
    side_by_side: bool = False
    interval: int = 1
    gated: bool = True
    scaled_by_norms: bool = False
    keys: dict[str, Value] = field(default_factory=dict)
    bare_keys: dict[str, Value] = field(default_factory=dict)

    @property
    def least_layers(self) -> int:
        """Return the fewest layers that `with_layers` takes: those of all mixers and one after the
        dense ones.
        """
        interval = 1 if self.delta is None else self.delta.interval
        return max(interval, self.interval, self.n_dense + 1)

    def with_layers(self, n_layers: int) -> Shape:
        """Return the shape with its first layers only."""
        if n_layers == self.n_layers:
            return self
        return replace(self, n_layers=n_layers, name=f"{self.name}.{n_layers}L")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of all tensors, in the order of a converted file."""
        yield TOKEN_EMBEDDING, (self.n_vocab, self.width)
        if self.llama3_rope:
            yield "rope_freqs.weight", (self.head // 2,)
        if self.long_rope:
            for which in ("long", "short"):
                yield f"rope_factors_{which}.weight", ((self.rotated or self.head) // 2,)
        for layer in range(self.n_layers):
            for name, shape in (*self._mixer(layer), *self._feed_forward(layer)):
                yield f"blk.{layer}.{name}", shape
        if self.last_norm:
            yield from self._norm(self.last_norm)
        if not self.tied:
            yield OUTPUT, (self.n_vocab, self.width)
        if "output" in self.biases:
            yield "output.bias", (self.n_vocab,)

    def _norm(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (self.width,)
        if self.layer_norm and self.norm_biases:
            yield f"{name}.bias", (self.width,)

    def _mixer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.attn_norm:
            yield from self._norm(self.attn_norm)
        if self.delta is not None and (layer + 1) % self.delta.interval:
            yield from self.delta.tensors(self.width)
        elif self.latent is not None:
            yield from self._latent(self.latent)
        else:
            yield from self._attention()
        if self.post_norms:
            yield from self._norm(self.post_norms[0])

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        value_head = self.value_head or self.head
        q, k, v = (
            self.n_heads * self.head,
            self.n_kv_heads * self.head,
            self.n_kv_heads * value_head,
        )
        gates = self.n_heads * (1 if self.head_gates else value_head)
        apart = (
            ("attn_q", q * (2 if self.gate and not self.gate_apart else 1), self.width),
            ("attn_k", k, self.width),
            ("attn_v", v, self.width),
            *([("attn_gate", gates, self.width)] if self.gate_apart else []),
        )
        joined = (("attn_qkv", q + k + v, self.width),)
        for name, n_out, n_in in (
            *(joined if self.joined or self.joined_heads else apart),
            ("attn_output", self.width, self.n_heads * value_head),
        ):
            yield f"{name}.weight", (n_out, n_in)
            if name in self.biases:
                yield f"{name}.bias", (n_out,)
        if self.head_norms or self.joined_norms:
            yield "attn_q_norm.weight", (q if self.joined_norms else self.head,)
            yield "attn_k_norm.weight", (k if self.joined_norms else self.head,)
        if self.sinks:
            yield "attn_sinks.weight", (self.n_heads,)

    def _latent(self, s: LatentSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
        heads, key = self.n_heads, s.nope + s.rope
        if s.q_rank:
            yield "attn_q_a.weight", (s.q_rank, self.width)
            yield "attn_q_a_norm.weight", (s.q_rank,)
            yield "attn_q_b.weight", (heads * key, s.q_rank)
        else:
            yield "attn_q.weight", (heads * key, self.width)
        yield "attn_kv_a_mqa.weight", (s.kv_rank + s.rope, self.width)
        yield "attn_kv_a_norm.weight", (s.kv_rank,)
        if s.joined:
            yield "attn_kv_b.weight", (heads * (s.nope + s.value), s.kv_rank)
        else:
            yield "attn_k_b.weight", (heads, s.kv_rank, s.nope)
            yield "attn_v_b.weight", (heads, s.value, s.kv_rank)
        if self.head_gates:
            yield "attn_gate.weight", (heads, self.width)
        elif self.gate_apart:
            yield "attn_gate.weight", (heads * s.value, self.width)
        if self.sinks:
            yield "attn_sinks.weight", (heads,)
        yield "attn_output.weight", (self.width, heads * s.value)
        if self.indexer is not None:
            yield from self.indexer.tensors(self.width, s.q_rank)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.ffn_norm and not self.side_by_side:
            yield from self._norm(self.ffn_norm)
        if self.n_experts and layer >= self.n_dense and (layer + 1) % self.interval == 0:
            yield "ffn_gate_inp.weight", (self.n_experts, self.width)
            if "ffn_gate_inp" in self.biases:
                yield "ffn_gate_inp.bias", (self.n_experts,)
            if self.choice_bias:
                yield self.choice_bias_name, (self.n_experts,)
            yield from self._gated("_exps", (self.n_experts,), self.hidden)
            if self.shared:
                yield from self._gated("_shexp", (), self.shared)
            if self.shared_gate:
                yield "ffn_gate_inp_shexp.weight", (1, self.width)
        else:
            yield from self._gated("", (), self.dense_hidden or self.hidden)
        if self.post_norms:
            yield from self._norm(self.post_norms[1])

    def _gated(
        self, suffix: str, stack: tuple[int, ...], hidden: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        gate, up = ("ffn_gate", hidden, self.width), ("ffn_up", hidden, self.width)
        inputs = (gate, up) if self.gated else (up,)
        if stack and self.merged:
            inputs = (("ffn_gate_up", 2 * hidden, self.width),)
        elif self.joined or self.joined_gate_up:
            inputs = (("ffn_up", 2 * hidden, self.width),)
        for name, n_out, n_in in (*inputs, ("ffn_down", self.width, hidden)):
            yield f"{name}{suffix}.weight", (*stack, n_out, n_in)
            if f"{name}{suffix}" in self.biases:
                yield f"{name}{suffix}.bias", (*stack, n_out)

    def metadata(self, type: GGMLType) -> dict[str, Value]:
        """Keys of a file whose matrices are of this type."""
        a = self.architecture
        out = {
            "block_count": u32(self.n_layers),
            "context_length": u32(self.context),
            "embedding_length": u32(self.width),
            "feed_forward_length": u32(self.dense_hidden or self.hidden),
            "attention.head_count": u32(self.n_heads),
            "attention.head_count_kv": u32(self.n_kv_heads),
            "rope.freq_base": f32(self.rope_base),
            f"attention.layer_norm_{'' if self.layer_norm else 'rms_'}epsilon": f32(self.eps),
            "attention.key_length": u32(self.head),
            "attention.value_length": u32(self.value_head or self.head),
            "rope.dimension_count": u32(self.rotated or self.head),
            "vocab_size": u32(self.n_vocab),
        }
        if self.n_experts:
            out |= {
                "expert_count": u32(self.n_experts),
                "expert_used_count": u32(self.n_used),
                "expert_feed_forward_length": u32(self.hidden),
            }
        if (s := self.latent) is not None:
            out |= {
                "attention.q_lora_rank": u32(s.q_rank),
                "attention.kv_lora_rank": u32(s.kv_rank),
            }
            if not s.q_rank:
                del out["attention.q_lora_rank"]
        if s is not None and not s.joined:  # as llama.cpp describes it: heads of latent vectors
            out |= {
                "attention.key_length": u32(s.kv_rank + s.rope),
                "attention.value_length": u32(s.kv_rank),
                "attention.key_length_mla": u32(s.nope + s.rope),
                "attention.value_length_mla": u32(s.value),
            }
        if self.n_dense:
            out["leading_dense_block_count"] = u32(self.n_dense)
        if self.delta is not None:
            out |= self.delta.keys
        if self.indexer is not None:
            out |= self.indexer.keys
        found = {
            "general.architecture": string(a),
            "general.name": string(f"{a} {self.name} of random weights"),
            "general.size_label": string(self.name),
        }
        found |= {f"{a}.{key}": value for key, value in (out | self.keys).items()}
        found |= self.bare_keys
        if type.name in FILE_TYPES:
            found["general.file_type"] = u32(FILE_TYPES[type.name].number)
        return found

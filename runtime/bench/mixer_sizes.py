"""Sizes of delta nets, state-space layers, short convolutions, latent attention, residual streams
and n-grams, with their tensors and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...formats.values import Value, ValueType, array, boolean, f32, u32


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of gated delta nets. Every `interval`th layer has attention instead. joined: alpha and
    beta are one matrix, and the value heads of a key head are side by side.
    """

    key_heads: int
    value_heads: int
    length: int
    convolution: int = 4
    interval: int = 4
    joined: bool = False

    def tensors(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer without its norm."""
        values = self.value_heads * self.length
        channels = 2 * self.key_heads * self.length + values
        yield "ssm_a", (self.value_heads,)
        yield "ssm_conv1d.weight", (channels, self.convolution)
        yield "ssm_dt.bias", (self.value_heads,)
        if self.joined:
            yield "ssm_ba.weight", (2 * self.value_heads, width)
        else:
            yield "ssm_alpha.weight", (self.value_heads, width)
            yield "ssm_beta.weight", (self.value_heads, width)
        yield "attn_qkv.weight", (channels, width)
        yield "attn_gate.weight", (values, width)
        yield "ssm_norm.weight", (self.length,)
        yield "ssm_out.weight", (width, values)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of the delta nets, without the architecture's name."""
        return {
            "full_attention_interval": u32(self.interval),
            "ssm.conv_kernel": u32(self.convolution),
            "ssm.state_size": u32(self.length),
            "ssm.group_count": u32(self.key_heads),
            "ssm.time_step_rank": u32(self.value_heads),
            "ssm.inner_size": u32(self.value_heads * self.length),
        }


@dataclass(frozen=True)
class StateSpaceSizes:
    """Sizes of state-space layers, as in `StateSpaceSpec`. normed: results of groups are normed."""

    heads: int
    length: int
    state: int
    groups: int
    convolution: int = 4
    normed: bool = True

    def tensors(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer without its norm."""
        inner = self.heads * self.length
        channels = inner + 2 * self.groups * self.state
        yield "ssm_a", (self.heads, 1)
        yield "ssm_d", (self.heads, 1)
        yield "ssm_conv1d.bias", (channels,)
        yield "ssm_conv1d.weight", (channels, self.convolution)
        yield "ssm_dt.bias", (self.heads,)
        yield "ssm_in.weight", (inner + channels + self.heads, width)
        if self.normed:
            yield "ssm_norm.weight", (self.groups, inner // self.groups)
        yield "ssm_out.weight", (width, inner)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of these layers, without the architecture's name."""
        return {
            "ssm.conv_kernel": u32(self.convolution),
            "ssm.state_size": u32(self.state),
            "ssm.group_count": u32(self.groups),
            "ssm.time_step_rank": u32(self.heads),
            "ssm.inner_size": u32(self.heads * self.length),
        }


@dataclass(frozen=True)
class SelectiveSizes:
    """Sizes of selective state spaces, as in `SelectiveSpec`. normed: steps and vectors are, with
    `weighted` by weights.
    """

    channels: int
    state: int
    rank: int
    convolution: int = 4
    normed: bool = False
    weighted: bool = False

    def tensors(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer without its norm."""
        n = self.channels
        if self.weighted:
            yield "ssm_b_norm.weight", (self.state,)
            yield "ssm_c_norm.weight", (self.state,)
            yield "ssm_dt_norm.weight", (self.rank,)
        yield "ssm_a", (n, self.state)
        yield "ssm_d", (n,)
        yield "ssm_conv1d.bias", (n,)
        yield "ssm_conv1d.weight", (n, self.convolution)
        yield "ssm_dt.bias", (n,)
        yield "ssm_dt.weight", (n, self.rank)
        yield "ssm_in.weight", (2 * n, width)
        yield "ssm_out.weight", (width, n)
        yield "ssm_x.weight", (self.rank + 2 * self.state, n)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of these layers, without the architecture's name."""
        return {
            "ssm.conv_kernel": u32(self.convolution),
            "ssm.state_size": u32(self.state),
            "ssm.time_step_rank": u32(self.rank),
            "ssm.inner_size": u32(self.channels),
            "ssm.dt_b_c_rms": boolean(self.normed),
        }


@dataclass(frozen=True)
class KimiDeltaSizes:
    """Sizes of Kimi delta attention, as in `KimiDeltaSpec`. low_rank: decays and gates come from
    two products. rate_columns: rates of decays are a column each.
    """

    heads: int
    length: int
    convolution: int = 4
    bound: float = 0.0
    low_rank: bool = True
    rate_columns: bool = True

    def tensors(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer without its norm."""
        inner = self.heads * self.length
        for part in "qkv":
            yield f"ssm_conv1d_{part}.weight", (1, inner, 1, self.convolution)
            yield f"attn_{part}.weight", (inner, width)
        for part in "fg":
            if self.low_rank:
                yield f"ssm_{part}_a.weight", (self.length, width)
                yield f"ssm_{part}_b.weight", (inner, self.length)
            else:
                yield f"ssm_{part}_a.weight", (inner, width)
        yield "ssm_a", (self.heads, 1) if self.rate_columns else (self.heads,)
        yield "ssm_dt.bias", (inner,)
        yield "ssm_beta.weight", (self.heads, width)
        yield "ssm_norm.weight", (self.length,)
        yield "attn_output.weight", (width, inner)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of these layers, without the architecture's name."""
        own = {"ssm.conv_kernel": u32(self.convolution), "kda.head_dim": u32(self.length)}
        return own | ({"kda.gate_lower_bound": f32(self.bound)} if self.bound else {})


@dataclass(frozen=True)
class ConvSizes:
    """Sizes of gated short convolutions."""

    taps: int = 3

    def tensors(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer without its norm."""
        yield "shortconv.conv.weight", (width, self.taps)
        yield "shortconv.in_proj.weight", (3 * width, width)
        yield "shortconv.out_proj.weight", (width, width)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of these layers, without the architecture's name."""
        return {
            "shortconv.l_cache": u32(self.taps),
        }


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention, as in `MLASpec`. joined: keys and values of all heads are one
    matrix, and keys of the file describe heads.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    joined: bool = False


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of the indexer of sparse attention, as in `IndexerSpec`. Every layer has one. pool: so
    many positions have one key together; 0: each has its own.
    """

    heads: int
    length: int
    top_k: int
    pool: int = 0

    def tensors(self, width: int, q_rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of a layer."""
        yield "indexer.k_norm.weight", (self.length,)
        yield "indexer.k_norm.bias", (self.length,)
        yield "indexer.proj.weight", (self.heads, width)
        yield "indexer.attn_k.weight", (self.length, width)
        yield "indexer.attn_q_b.weight", (self.heads * self.length, q_rank)
        if self.pool:
            yield "indexer_compressor_ape.weight", (self.pool, self.length)
            yield "indexer_compressor_gate.weight", (self.length, width)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of the indexer, without the architecture's name."""
        found = {
            "attention.indexer.head_count": u32(self.heads),
            "attention.indexer.key_length": u32(self.length),
            "attention.indexer.top_k": u32(self.top_k),
        }
        if self.pool:
            found["attention.indexer.kpool"] = u32(self.pool)
            found["attention.indexer.kpool_select_tail"] = boolean(True)
        return found


@dataclass(frozen=True)
class StreamSizes:
    """Sizes of several residual streams, as in `StreamSpec`. magnitude: of what layers give, where
    streams keep what they are; 0 where they are mixed.
    """

    n: int = 4
    iterations: int = 20
    epsilon: float = 1e-6
    magnitude: float = 0.0

    def around(self, part: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors around a layer. part: `attn` or `ffn`."""
        numbers, groups = (2 * self.n, 2) if self.magnitude else ((2 + self.n) * self.n, 3)
        yield from self._mixing(f"hc_{part}", numbers, groups, width)

    def ends(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors after the last layer."""
        yield from self._mixing("output_hc", self.n, 1, width)

    def _mixing(
        self, name: str, numbers: int, groups: int, width: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}_fn.weight", (numbers, self.n * width)
        yield f"{name}_base.weight", (numbers,)
        yield f"{name}_scale.weight", (groups,)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of the streams, without the architecture's name."""
        found = {
            "hyper_connection.count": u32(self.n),
            "hyper_connection.epsilon": f32(self.epsilon),
        }
        if self.magnitude:
            return found | {"hyper_connection.magnitude": f32(self.magnitude)}
        return found | {"hyper_connection.sinkhorn_iterations": u32(self.iterations)}


@dataclass(frozen=True)
class GatedStreamSizes:
    """Sizes of residual streams whose mixers give each element a weight, as in
    `GatedStreamParts`.
    """

    n: int = 4
    rank: int = 320

    def around(self, part: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors around a layer. part: `attn` or `ffn`."""
        yield from self._mixer(f"hc_{part}", width)
        yield f"hc_{part}_inject.weight", (self.n, self.n * width)

    def ends(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors after the last layer."""
        yield from self._mixer("output_hc", width)

    def _mixer(self, name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}_norm.weight", (self.n * width,)
        yield f"{name}_down.weight", (self.rank, self.n * width)
        yield f"{name}_up.weight", (self.n * width, self.rank)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of the streams, without the architecture's name."""
        return {
            "hyper_connection.count": u32(self.n),
            "hyper_connection.low_rank": u32(self.rank),
        }


@dataclass(frozen=True)
class NgramSizes:
    """Sizes of the embeddings of n-grams that one layer adds, as in `NgramSpec`: heads of `rows`
    rows each, of `length` elements. Hashes of real models have other multipliers.
    """

    layer: int
    rows: int
    length: int
    heads: int = 8
    size: int = 3
    taps: int = 4
    end: int = 0

    @property
    def n_heads(self) -> int:
        """Heads of all lengths together."""
        return (self.size - 1) * self.heads

    @property
    def table(self) -> tuple[int, int]:
        """The shape of `per_layer_token_embd`."""
        return self.rows * self.n_heads, self.length

    def tensors(self, width: int, streams: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, numpy-order shape) of the tensors of the layer, without the table."""
        n_in, n_out = self.n_heads * self.length, streams * width
        yield "ple_key.weight", (n_out, n_in)
        yield "ple_value.weight", (width, n_in)
        yield "ple_conv1d.weight", (n_out, self.taps)
        for name in ("key", "query", "conv"):
            yield f"ple_norm_{name}.weight", (n_out,)

    @property
    def keys(self) -> dict[str, Value]:
        """Return the metadata keys of the n-grams, without the architecture's name."""
        multipliers = [2 * (1 << 20) * (i + 1) + 1 for i in range(self.size)]
        arrays = {
            "layer_multipliers": multipliers,
            "head_offsets": [self.rows * head for head in range(self.n_heads)],
            "head_vocab_sizes": [self.rows] * self.n_heads,
        }
        return {
            "ple.layers": array(ValueType.INT32, [self.layer]),
            "ple.ngram_size": u32(self.size),
            "ple.heads_per_ngram": u32(self.heads),
            "ple.conv_kernel": u32(self.taps),
            "ple.eos_token_id": u32(self.end),
            "embedding_length_per_layer_input": u32(self.length),
            **{f"ple.{name}": array(ValueType.UINT64, x) for name, x in arrays.items()},
        }

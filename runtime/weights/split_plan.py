"""The split plan: what each tensor-parallel rank holds of every tensor and computes of every layer.

A plan is data. `parallel.planner` makes it from a network and shares, `shard` reads the tensors of
a rank, `parallel.share` gives its layers their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Range = tuple[int, int]
"""A range (start, stop) of a dimension of the whole tensor."""

NOTHING: Range = (0, 0)

Kind = Literal["copy", "one", "rows", "columns", "experts"]
ExpertMode = Literal["columns", "whole"]


@dataclass(frozen=True)
class TensorSplit:
    """What each rank holds of one tensor.

    kind:
    - `copy`: every rank has the whole tensor; `ranges` is empty.
    - `one`: rank `owner` has the whole tensor, others have nothing of it (a bias that is added to a
      sum once); `ranges` is empty.
    - `rows`: output rows of each matrix, or elements of a vector.
    - `columns`: input columns of each matrix, at multiples of the block of its type. Row headers
      are copied.
    - `experts`: whole matrices of a stack: experts, or heads of `attn_k_b` and `attn_v_b`.

    ranges: for each rank the ranges that it holds, in the order in which it holds them; empty for a
    rank that holds nothing. Ranks that share a key/value head hold the same rows of it, and a rank
    can hold a range twice (see `LayerShare.kv_heads`); else ranges do not overlap.
    axis: the dimension that `ranges` count, in numpy order: 0 for experts, -2 for rows of matrices,
    -1 for columns and for the elements of vectors, also of a stack of vectors.
    sum_after: results of the ranks are partial, and add up to the whole result.
    tied: the tensor of the file that is read instead, for an `output.weight` that is the embedding.
    """

    kind: Kind
    ranges: tuple[tuple[Range, ...], ...] = ()
    axis: int = 0
    sum_after: bool = False
    owner: int = 0
    tied: str = ""

    def of(self, rank: int, n: int) -> tuple[Range, ...]:
        """Return the ranges of a rank, of a dimension of n."""
        if self.kind == "copy" or (self.kind == "one" and rank == self.owner):
            return ((0, n),)
        return () if self.kind == "one" else self.ranges[rank]

    def size(self, rank: int, n: int) -> int:
        """Return how many of the n elements of the dimension a rank holds."""
        return sum(stop - start for start, stop in self.of(rank, n))


@dataclass(frozen=True)
class LayerShare:
    """What one rank computes of one layer. A range that is `NOTHING` means: no part of it.

    heads: query heads, of softmax or latent attention.
    kv_heads: the key/value head of every local group of query heads; local query head h reads local
    key/value head h // (heads / len(kv_heads)). A head is in it twice if the rank has query heads
    of several key/value heads in unequal numbers. Empty for latent attention, whose cache every
    rank holds.
    key_heads: key heads of a delta net. Value heads follow them: see `Share.delta_net`. Or groups
    of heads of a state-space layer.
    channels: those of a short convolution.
    ffn: hidden columns of the dense feed-forward layer.
    experts: whole experts. All of them, unless `expert_mode` is `whole`.
    expert_ffn: hidden columns of these experts. All of them if `expert_mode` is `whole`.
    shared_ffn: hidden columns of the shared expert.
    expert_mode:
    - `columns`: every rank has some hidden columns of all experts.
    - `whole`: every rank has some experts.
    """

    heads: Range = NOTHING
    kv_heads: tuple[int, ...] = ()
    key_heads: Range = NOTHING
    channels: Range = NOTHING
    ffn: Range = NOTHING
    experts: Range = NOTHING
    expert_ffn: Range = NOTHING
    shared_ffn: Range = NOTHING
    expert_mode: ExpertMode = "columns"

    @property
    def n_heads(self) -> int:
        """Query heads of this rank."""
        return length(self.heads)

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads of this rank."""
        return len(self.kv_heads)

    @property
    def n_experts(self) -> int:
        """Experts of this rank."""
        return length(self.experts)


@dataclass(frozen=True)
class SplitPlan:
    """The split of a model over `len(shares)` ranks.

    shares: the part of the work of each rank; they add up to 1. tensors: by name, for every tensor
    that the model uses, and `output.weight` even if the file has none. layers: for every layer the
    share of each rank. vocabulary: the rows of the output matrix of each rank, one after the other;
    logits are joined in this order.
    """

    shares: tuple[float, ...]
    tensors: Mapping[str, TensorSplit]
    layers: tuple[tuple[LayerShare, ...], ...]
    vocabulary: tuple[Range, ...] = field(default=())

    @property
    def n_ranks(self) -> int:
        """Ranks of the plan."""
        return len(self.shares)

    def of(self, name: str) -> TensorSplit:
        """Return the split of a tensor: a copy if the plan does not name it."""
        return self.tensors.get(name, COPY)


COPY = TensorSplit("copy")


def length(range: Range) -> int:
    """Return the number of elements of a range."""
    return range[1] - range[0]

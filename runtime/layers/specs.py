"""Frozen descriptions of layers. An architecture file fills them in; the reference module and the
executors of the fast path of a kind read the same description.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by
    1 + scale * ln(1 + floor((p + offset) / original_context)).
    """

    scale: float
    original_context: int
    offset: int = 0


@dataclass(frozen=True)
class OwnHeads:
    """The heads of a rank whose products give those of all ranks. n_queries, n_keys: how many these
    are. queries, keys: the number of each own head among them.
    """

    n_queries: int
    n_keys: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention with grouped key/value heads.

    Query head h reads key/value head h // (heads / kv_heads). scale: of the scores. window: the
    most positions that a token sees, itself included; 0 for all. chunked: a token sees those from
    the last multiple of `window` on instead, which are as many at most. softcap: scores become
    softcap * tanh(scores / softcap); 0 for none. sinks: every head has a learned score that takes
    part in the softmax only. gate: the query projection gives a query and a gate for every head;
    the result is multiplied by sigmoid(gate). gate_apart: gates have a projection of their own;
    with `head_gates` that gives one for all elements of a head. softplus_gates: the result is
    multiplied by log(1 + e^gate) instead. value_norm: value heads are divided
    by their root mean square. joined_norms: a norm of queries or keys is over all heads of the
    model together. On a rank the products then give all these heads, and `own` says which are its
    own. norms_last: norms of query and key heads follow the rotation. kv_from: the layer whose keys
    and values are used instead of own ones. kv_shared: later layers use the keys and values of this
    one.
    """

    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    gate: bool = False
    value_norm: bool = False
    joined_norms: bool = False
    own: OwnHeads | None = None
    kv_from: int | None = None
    kv_shared: bool = False
    temperature: Temperature | None = None
    norms_last: bool = False
    chunked: bool = False
    gate_apart: bool = False
    head_gates: bool = False
    softplus_gates: bool = False

    @property
    def gated_queries(self) -> bool:
        """Whether every query head is followed by its gate."""
        return self.gate and not self.gate_apart

    @property
    def gate_length(self) -> int:
        """Gates of a head that have a projection of their own."""
        return 1 if self.head_gates else self.value_length

    def opened(self, gates: torch.Tensor) -> torch.Tensor:
        """Return what gates multiply results by."""
        return F.softplus(gates) if self.softplus_gates else gates.sigmoid()

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` sees."""
        if self.chunked:
            return position // self.window * self.window
        return max(0, position - self.window + 1) if self.window else 0

    def in_chunks(self, start: int, stop: int) -> list[tuple[range, int]]:
        """Return the positions from start up to stop in pieces whose tokens see a window, or all
        from one position on, with this position.
        """
        if not self.chunked:
            return [(range(start, stop), self.first_seen(start))]
        edges = [start, *range(self.first_seen(start) + self.window, stop, self.window), stop]
        return [(range(a, b), self.first_seen(a)) for a, b in pairwise(edges) if a < b]

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Rows of the query projection."""
        heads = self.heads if self.own is None else self.own.n_queries
        return heads * self.key_length * (2 if self.gated_queries else 1)

    @property
    def key_rows(self) -> int:
        """Rows of the key projection."""
        return (self.kv_heads if self.own is None else self.own.n_keys) * self.key_length

    @property
    def value_rows(self) -> int:
        """Rows of the value projection."""
        return self.kv_heads * self.value_length


NEAR = 0.02  # twice the jitter of Phi-3.5-MoE, for which files have no key


@dataclass(frozen=True)
class RouterSpec:
    """How tokens choose experts.

    score: `softmax` or `sigmoid` of the logits, `sqrt_softplus`, `selected`, the softmax over the
    logits of the chosen experts, or `sparse_mixer`: the weight of each chosen expert, whose logit
    is m, is its softmax over the experts that are not chosen before it and whose logits x are near,
    m - x <= NEAR max(|x|, m) (Liu et al., 2024, https://arxiv.org/abs/2409.12136). groups: experts
    are chosen from the `groups_used` best of so many groups; a group is as good as the sum of its
    `group_best` best experts. norm: weights are divided by their sum. scale: weights are multiplied
    by it afterwards. on_input: weights multiply what experts read, and not what they give.
    """

    n_experts: int
    n_used: int
    score: str = "softmax"
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    norm: bool = True
    scale: float = 1.0
    on_input: bool = False


@dataclass(frozen=True)
class Xielu:
    """alpha_p x^2 + beta x for x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x for others
    (Huang and Schlag, 2024).
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


@dataclass(frozen=True)
class FFNSpec:
    """A feed-forward layer. activation: `silu`, `gelu` (the tanh form), `gelu_erf`, `relu`,
    `relu_squared`, `xielu`, `swiglu_oai`, which is gate * sigmoid(1.702 gate) * (up + 1), or
    `capped_silu`. gated: the activation of one product multiplies another one. With a `limit` the
    gate is first clamped to at most the limit, and up to within the limit of 0. `capped_silu`
    clamps silu(gate) instead of the gate, as Step 3.5 does. xielu: the numbers of that activation,
    which has no gate. cutoff: of a gate is left what is more than so many standard deviations above
    its mean (None: all of it).
    """

    activation: str = "silu"
    gated: bool = True
    limit: float = 0.0
    xielu: Xielu | None = None
    cutoff: float | None = None

    @property
    def is_silu(self) -> bool:
        """Whether the activation is silu and nothing else is done."""
        return self.activation == "silu" and not self.limit and self.cutoff is None


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    kv_rank: length of the latent vector, which the cache holds next to one rotated key of
    `rope_length` for all heads. q_rank: length of the latent query; 0 if queries are projected
    directly. Query and key heads have nope_length + rope_length elements, value heads value_length.
    absorb: new tokens of a sequence below which keys and values are not rebuilt from the latent
    vectors; queries and results are projected instead. gate_length: gates of a head, where there
    are gates.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_length: int
    rope_length: int
    value_length: int
    scale: float
    absorb: int = 128
    temperature: Temperature | None = None
    gate_length: int = 1

    @property
    def cache_width(self) -> int:
        """Elements that the cache holds for a position."""
        return self.rope_length + self.kv_rank

    @property
    def key_length(self) -> int:
        """Elements of a query or key head."""
        return self.nope_length + self.rope_length


@dataclass(frozen=True)
class IndexerSpec:
    """The selection of positions of sparse attention (DeepSeek-V3.2, 2025).

    Every token sees the `top_k` positions with the best scores of `heads` small heads. own: this
    layer computes the selection; others use the one of the last layer that did. rope_last: the last
    elements are rotated, not the first ones.
    """

    heads: int
    key_length: int
    rope_length: int
    top_k: int
    own: bool = True
    rope_last: bool = False


@dataclass(frozen=True)
class DeltaNetSpec:
    """The gated delta rule (Yang et al., 2024) after a short convolution.

    Value head j reads key head j % key_heads if `tiled`, else j // (value_heads / key_heads).
    sigmoid: results are multiplied by the sigmoid of their gates, not by SiLU.
    """

    key_heads: int
    value_heads: int
    key_length: int
    value_length: int
    convolution: int
    tiled: bool
    sigmoid: bool = False

    @property
    def channels(self) -> int:
        """Rows of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_length + self.value_heads * self.value_length


@dataclass(frozen=True)
class KimiDeltaSpec:
    """Kimi delta attention (Kimi Team, 2025): the delta rule with a decay for each element of a
    key. Keys and values of a head have the same length. bound: a number below 0 that the logarithms
    of decays stay above; 0 for none.
    """

    heads: int
    length: int
    convolution: int
    bound: float = 0.0

    @property
    def inner(self) -> int:
        """Elements of the queries, keys or values of all heads."""
        return self.heads * self.length

    @property
    def channels(self) -> int:
        """Rows of the convolutions: queries, keys and values."""
        return 3 * self.inner


@dataclass(frozen=True)
class StateSpaceSpec:
    """A state-space layer of Mamba-2 (Dao and Gu, 2024): every head has a memory of state_length x
    head_length elements. Head j is in group j // (heads / groups); the heads of a group write and
    read by the same vectors, and are normed together.
    """

    heads: int
    head_length: int
    state_length: int
    groups: int
    convolution: int

    @property
    def inner(self) -> int:
        """Elements of the values of all heads."""
        return self.heads * self.head_length

    @property
    def channels(self) -> int:
        """Rows of the convolution: values, and the vectors of each group that write and read."""
        return self.inner + 2 * self.groups * self.state_length

    @property
    def inputs(self) -> int:
        """Rows of the first product: gates, channels of the convolution, and steps."""
        return self.inner + self.channels + self.heads


@dataclass(frozen=True)
class SelectiveSpec:
    """A selective state space of the first Mamba (Gu and Dao, 2023): every channel has a memory of
    state_length elements. rank: elements of the vector from which the steps of channels come. eps:
    of the norms of this vector and of those that write and read memories; None for no norms.
    """

    channels: int
    state_length: int
    rank: int
    convolution: int
    eps: float | None = None


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated short convolution (LFM2, Liquid AI, 2025): c * conv(b * x) over the last `taps`
    tokens of each channel.
    """

    channels: int
    taps: int

"""Embeddings of the last tokens of a text (Engram, DeepSeek, 2026; as in Qwen3.8-Flash-Next, Qwen,
2026): rows of a large table that hashes of n-grams choose, added to all residual streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings
from ...state.layer_state import Storage
from ...state.recurrent import RecurrentState, States, keep, kept
from ...state.table import Table
from ...weights.linear import Embedding, Linear
from ..batch import Batch
from ..streams import StreamNorm


@dataclass(frozen=True)
class NgramSpec:
    """Which rows of the table the n-grams of 2 to `size` tokens have.

    The hash of an n-gram is the exclusive or of its tokens, each times one of the `multipliers`,
    the first of which belongs to the last token. Each length has as many heads, of which head i
    reads the row hash modulo `sizes[i]` + `offsets[i]`. n-grams do not look beyond `end`, the token
    that ends texts: it also stands for what is missing. taps: of the convolution, whose inputs are
    `size` tokens apart.
    """

    size: int
    end: int
    taps: int
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Earlier tokens whose values the convolution reads."""
        return (self.taps - 1) * self.size

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return int64[sequences, n, heads], the rows of n tokens, for tokens int64[sequences, size
        - 1 + n], which begin with those before the first one.
        """
        n, device = tokens.shape[1] - self.size + 1, tokens.device
        offsets, sizes = (torch.tensor(x, device=device) for x in (self.offsets, self.sizes))
        ended, mixed, found = None, torch.zeros((), dtype=torch.int64, device=device), []
        heads = len(self.sizes) // (self.size - 1)
        for back, multiplier in enumerate(self.multipliers):
            first = self.size - 1 - back
            earlier = tokens[:, first : first + n]
            if back:  # the last token may be the end itself
                here = earlier == self.end
                ended = here if ended is None else ended | here
                earlier = earlier.masked_fill(ended, self.end)
            mixed = mixed ^ (earlier * multiplier)
            if back:
                own = slice((back - 1) * heads, back * heads)
                found.append(mixed[..., None] % sizes[own] + offsets[own])
        return torch.cat(found, dim=-1)


class Ngrams:
    """For every stream: g * v + silu(convolution of norm(g * v)), with the value v that `value`
    gives of the embeddings, and g = sigmoid(sign(s) sqrt |s|) for the product s / sqrt(width) of
    the normed stream and the normed key of the stream, which `key` gives.

    convolution: float32[streams * width, taps], the last column for the current token. What a
    sequence keeps has a place of its own, the number `place` (`Batch.place`): the inputs of the
    convolution, and the last tokens.
    """

    window = 0
    experts_used, expert_share = 1, 1.0

    def __init__(
        self,
        spec: NgramSpec,
        *,
        table: Embedding,
        key: Linear,
        value: Linear,
        norms: Sequence[StreamNorm],
        convolution: torch.Tensor,
        place: int,
        tensors: tuple[str, ...],
    ):
        """norms: of keys, of streams, and of what the convolution reads. tensors: the names of all
        tensors, which are whole on every rank.
        """
        self.spec, self.table, self.key, self.value = spec, table, key, value
        self.key_norm, self.query_norm, self.input_norm = norms
        self.convolution, self.place, self.tensors = convolution, place, tensors

    @property
    def _memory(self) -> tuple[int, int, int]:
        return 1, 1, self.spec.size - 1

    def new_storage(self, n_rows: int, settings: CacheSettings, device: torch.device) -> None:
        """Return None: nothing that is kept belongs to positions."""

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> RecurrentState:
        """Return what is kept of one sequence. The memory has the last tokens, less the one that
        ends texts, so that zeros stand for those that are missing.
        """
        return RecurrentState(self.spec.reach, len(self.convolution), self._memory, device)

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence takes, whatever its capacity."""
        return 4 * (self.spec.reach * len(self.convolution) + self.spec.size - 1)

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of embeddings, and of keys, values and inputs of all streams."""
        return 4 * rows * (self.key.cols + 6 * len(self.convolution))

    def flop(self, n_past: int, n: int) -> float:
        """Return 0: the convolution counts as a matrix."""
        return 0.0

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of the state, which every token reads."""
        return float(n * self.state_bytes(0, settings))

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return what is added to the streams x float32[rows, streams * width], rows as `batch`
        says. Raise TypeError for a batch that does not know its tokens.
        """
        if batch.inputs is None:
            raise TypeError("the batch has no tokens for layers")
        tokens, batch = batch.inputs.to(x.device), batch.on_place(self.place)
        query, added = self.query_norm(x), []
        for span, states in batch.recurrent_spans():
            ids, q = (y[span].unflatten(0, (len(states), -1)) for y in (tokens, query))
            added.append(self._added(ids, q, states).flatten(0, 1))
        return added[0] if len(added) == 1 else torch.cat(added)

    def _added(self, tokens: torch.Tensor, query: torch.Tensor, states: States) -> torch.Tensor:
        """Return float32[sequences, n, streams * width] for tokens int64[sequences, n] and normed
        streams, which follow what `states` keep, and update these.
        """
        s, streams, n = self.spec, self.query_norm.n, tokens.shape[1]
        before, memory = kept(states, query, s.reach, self._memory)
        text = torch.cat([memory[:, 0, 0].long() + s.end, tokens], dim=1)
        rows = s.rows(text)
        embedded = self.table(rows.to(self.table.device)).to(query.device).flatten(-2)
        embedded = embedded.flatten(0, 1)
        keys = self.key_norm(self.key(embedded)).view_as(query).unflatten(-1, (streams, -1))
        products = (keys * query.unflatten(-1, (streams, -1))).sum(-1) * keys.shape[-1] ** -0.5
        gates = (products.abs().clamp(min=1e-6).sqrt() * products.sign()).sigmoid()
        values = self.value(embedded).unflatten(0, tokens.shape)
        gated = (gates[..., None] * values[..., None, :]).flatten(-2)
        inputs = self.input_norm(gated)
        all_inputs = torch.cat([before, inputs], dim=1)
        mixed = all_inputs[:, :n] * self.convolution[:, 0]
        for tap in range(1, s.taps):
            first = tap * s.size
            mixed += all_inputs[:, first : first + n] * self.convolution[:, tap]
        last = (text[:, n:] - s.end).float()[:, None, None]
        keep(states, before, inputs, last)
        return gated + F.silu(mixed)

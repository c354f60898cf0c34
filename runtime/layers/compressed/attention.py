"""Attention to near positions and to entries for runs of positions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...state.cache import CacheSettings, KVStorage
from ...state.compressed import CompressedState, CompressedStorage, EntryRows
from ...state.latent import settings_of
from ...state.layer_state import Storage
from ...state.table import Table
from ...weights.linear import Linear
from ...weights.stacked_linear import HeadLinear
from ..batch import Batch
from ..costs import pairs
from ..norm import RMSNorm
from ..rope import Rope
from .entries import Compressor, EntryIndexer, rotated
from .specs import CompressedSpec

_SCORES_MIB = 64  # of scores at a time
_PLAIN = CacheSettings("f32", "f32")


class CompressedAttention:
    """softmax(scale * [Q K^T, sinks]) K without the column of sinks, for the keys K of the last
    positions and the entries of a compressor, which are values as well. As keys are rotated, what
    the softmax mixes is turned back by the position of the token.

    Queries are projected by `q_a`, normed, projected by `q` and normed again without weights.
    `output_a` projects the results of each group of heads, and `output_b` what all groups give.
    """

    # What the window keeps is in the state: entries need all positions.
    window = 0

    def __init__(
        self,
        spec: CompressedSpec,
        *,
        q_a: Linear,
        q_norm: RMSNorm,
        q: Linear,
        kv: Linear,
        kv_norm: RMSNorm,
        output_a: HeadLinear,
        output_b: Linear,
        rope: Rope,
        sinks: torch.Tensor,
        compressor: Compressor | None = None,
        indexer: EntryIndexer | None = None,
    ):
        self.spec, self.q_a, self.q_norm, self.q = spec, q_a, q_norm, q
        self.kv, self.kv_norm, self.output_a, self.output_b = kv, kv_norm, output_a, output_b
        self.rope, self.sinks = rope, sinks
        self.compressor, self.indexer = compressor, indexer

    @property
    def compressors(self) -> list[Compressor]:
        """That of keys, and that of the indexer, where there are such."""
        found = [] if self.compressor is None else [self.compressor]
        return found if self.indexer is None else [*found, self.indexer.compressor]

    @property
    def _kinds(self) -> list[EntryRows]:
        return [EntryRows(c.length, c.inputs, c.ratio, c.overlaps) for c in self.compressors]

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> CompressedStorage:
        """Return how sequences are kept; the memory is their own. UsageError for a cache type that
        does not suit the length of keys.
        """
        rows, index = settings_of(settings)
        kinds = [rows, rows, index][: 1 + len(self.compressors)]
        for length, kind in zip(self._lengths, kinds, strict=True):
            KVStorage.bytes_per_token(1, length, 0, kind)
        return CompressedStorage(tuple(kinds))

    def new_state(
        self, storage: Storage | None, table: Table, device: torch.device
    ) -> CompressedState:
        """Return what is kept of one sequence. TypeError for a storage of another kind of layer."""
        if not isinstance(storage, CompressedStorage):
            raise TypeError("the storage is not one of compressed keys and values")
        s = self.spec
        return CompressedState(s.window, s.key_length, self._kinds, storage.settings, device)

    @property
    def _lengths(self) -> list[int]:
        """Elements of a key, and of each kind of entries."""
        return [self.spec.key_length, *(kind.length for kind in self._kinds)]

    def _row_bytes(self, settings: CacheSettings) -> list[int]:
        """Return the bytes of a key, and of each kind of entries."""
        rows, index = settings_of(settings)
        kinds = zip(self._lengths, (rows, rows, index), strict=False)
        return [KVStorage.bytes_per_token(1, length, 0, kind) for length, kind in kinds]

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes: its window, inputs that
        wait, and entries.
        """
        of_key, *of_entries = self._row_bytes(settings)
        total = of_key * self.spec.window
        for kind, row in zip(self._kinds, of_entries, strict=True):
            total += kind.pending_bytes + capacity // kind.ratio * row
        return total

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of queries and results of all heads, of decoded entries, of the
        indexer's scores, and of a piece of scores.
        """
        s = self.spec
        entries = sum(keys // kind.ratio * kind.length for kind in self._kinds)
        chosen = rows * (keys // s.ratio) if s.index is not None else 0
        piece = max(_SCORES_MIB << 20, 4 * s.heads * (s.window + keys // max(1, s.ratio)))
        return 4 * (3 * rows * s.heads * s.key_length + 2 * entries + 3 * chosen) + 2 * piece

    def _seen(self, n_past: int, n: int) -> tuple[float, float]:
        """Return how many keys and entries n tokens see together, after n_past others."""
        s = self.spec
        near = pairs(n_past, n, s.window)
        return near, pairs(n_past, n, s.most_entries * s.ratio) / s.ratio if s.ratio else 0.0

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations for n tokens after n_past others; the indexer looks at all
        entries.
        """
        s = self.spec
        found = 4.0 * s.heads * s.key_length * sum(self._seen(n_past, n))
        if s.index is not None:
            found += 2.0 * s.index.heads * s.index.key_length * pairs(n_past, n) / s.ratio
        return found

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of keys and entries that tokens see, and of all entries of the
        indexer.
        """
        of_key, *of_entries = self._row_bytes(settings)
        near, entries = self._seen(n_past, n)
        total = of_key * near + (of_entries[0] * entries if of_entries else 0.0)
        if self.indexer is not None:
            total += of_entries[1] * pairs(n_past, n) / self.spec.ratio
        return total

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        s = self.spec
        cos, sin = batch.angles(self.rope)
        latent = self.q_norm(self.q_a(x))
        q = self.q(latent).view(len(x), s.heads, s.key_length)
        q = rotated(self.rope, F.rms_norm(q, q.shape[-1:], None, self.q_norm.eps), (cos, sin))
        kv = rotated(self.rope, self.kv_norm(self.kv(x))[:, None], (cos, sin))[:, 0]
        inputs = [compressor.project(x, batch) for compressor in self.compressors]
        index = None if self.indexer is None else self.indexer.project(x, latent, batch)
        mixed = torch.empty_like(q)
        for i, (span, start) in enumerate(batch.spans()):
            state, origin = self._state(batch, i, start)
            new = [rows[span] for rows in inputs]
            entries = self._append(state, kv[span], new, origin)
            own = None if index is None else (index[0][span], index[1][span])
            mixed[span] = self._attend(q[span], state, entries, own)
            state.end_pass(span.stop - span.start)
        mixed = rotated(self.rope, mixed, (cos, -sin))
        return self.output_b(self.output_a(mixed.view(len(x), s.groups, -1)).flatten(1))

    def _state(self, batch: Batch, i: int, start: int) -> tuple[CompressedState, int]:
        """Return what is kept of sequence i of the batch, and the position of its first token: an
        empty state where sequences begin here.
        """
        if batch.states is None:
            storage = self.new_storage(0, batch.settings or _PLAIN, batch.positions.device)
            return self.new_state(storage, Table.alone(0), batch.positions.device), start
        state = batch.kept(batch.states[i])
        if not isinstance(state, CompressedState):
            raise TypeError(f"layer {batch.layer} keeps no compressed keys and values")
        state.begin_pass(start, batch.layer)
        return state, 0

    def _append(
        self, state: CompressedState, kv: torch.Tensor, inputs: list[torch.Tensor], origin: int
    ) -> list[torch.Tensor]:
        """Add new tokens to a state, for keys float32[n, key_length] and what compressors project.
        Return all entries of each compressor, float32[entries, length].
        """
        seen, total = state.n_seen, state.n_seen + len(kv)
        state.near.append(kv)
        for i, (compressor, new) in enumerate(zip(self.compressors, inputs, strict=True)):
            rows = torch.cat([state.pending[i], new])
            first, ratio = compressor.first_needed(seen), compressor.ratio
            runs = range(seen // ratio, total // ratio)
            state.entries[i].append(compressor.entries(rows, runs, origin))
            state.pending[i] = rows[compressor.first_needed(total) - first :].clone()
        return [rows.read() for rows in state.entries]

    def _attend(
        self,
        q: torch.Tensor,
        state: CompressedState,
        entries: list[torch.Tensor],
        index: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return what the heads mix, float32[n, heads, key_length], for the queries of the last n
        tokens of a state, in pieces whose scores fit a fixed amount of memory. index: queries and
        weights of the indexer.
        """
        s, n, near = self.spec, len(q), state.near.read()
        total = state.n_seen + n
        first = total - len(near)  # position of the first key that is kept
        counts = [(p + 1) // s.ratio if s.ratio else 0 for p in range(state.n_seen, total)]
        far = entries[0] if entries else near[:0]
        chosen = None
        if index is not None and self.indexer is not None:
            chosen = self.indexer.select(*index, entries[1], counts)
        sinks = self.sinks.view(1, -1, 1)
        step = max(1, (_SCORES_MIB << 20) // (4 * s.heads * (2 * s.window + len(far))))
        mixed = torch.empty_like(q)
        for begin in range(0, n, min(step, s.window)):
            end = min(n, begin + min(step, s.window))
            start, stop = state.n_seen + begin, state.n_seen + end
            low, n_far = max(first, start - s.window + 1), counts[end - 1]
            keys = torch.cat([near[low - first : stop - first], far[:n_far]])
            own = torch.arange(start, stop, device=q.device)[:, None]
            at = torch.arange(low, stop, device=q.device)
            limits = torch.tensor(counts[begin:end], device=q.device)[:, None]
            seen = [
                (at <= own) & (at > own - s.window),
                torch.arange(n_far, device=q.device) < limits
                if chosen is None
                else chosen[begin:end, :n_far],
            ]
            scores = (q[begin:end] @ keys.T) * s.scale
            scores.masked_fill_(~torch.cat(seen, dim=1)[:, None], float("-inf"))
            weights = torch.cat([scores, sinks.expand(end - begin, -1, 1)], dim=-1).softmax(dim=-1)
            mixed[begin:end] = weights[..., :-1] @ keys
        return mixed

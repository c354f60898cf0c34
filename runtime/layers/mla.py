"""Multi-head latent attention (DeepSeek-V2, 2024): all heads share one latent vector per position,
from which their keys and values follow.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..state.cache import CacheSettings
from ..state.hadamard import hadamard
from ..state.latent import LatentCache, LatentStorage
from ..state.layer_state import Storage
from ..state.table import Table
from ..weights.linear import Linear
from ..weights.switches import Switches
from .attend import attend, attend_with_scores, temperature
from .batch import Batch
from .costs import LooksBack, pairs
from .indexer import Indexer
from .latent import UpProjection
from .latent_rows import Index, LatentRows, latent_rows
from .norm import RMSNorm
from .rope import Rope
from .specs import MLASpec

_SCORES_MIB = 64  # of scores of the absorbed form at a time
_BUFFER_MIB = 512  # of keys and values of the naive form at a time


def has_more(module: MLA) -> bool:
    """Return whether the module has what no kernels and programs evaluate: sinks, gates of
    elements, or an indexer that rotates its last elements.
    """
    indexer = module.indexer
    return (
        module.sinks is not None
        or module.spec.gate_length > 1
        or (indexer is not None and indexer.spec.rope_last)
    )


class MLA(LooksBack):
    """softmax(scale * Q K^T + causal mask) V with keys [W_k c | k_rope] and values W_v c for the
    latent vector c of each position. k_rope is one rotated key for all heads.

    The naive form computes keys and values. The absorbed form multiplies queries by W_k^T, attends
    to [k_rope | c] as one head, and multiplies the mixtures of c by W_v: the same numbers but for
    rounding, with less work for few tokens. `spec.absorb` chooses. While an observer reads inputs,
    `attn_k_b` and `attn_v_b` are used in the absorbed form only, as their statistics are those of
    its inputs.

    `q` (after `q_a` and `q_norm`, if the query has a latent vector too) projects to heads [nope |
    rope]. `kv_a` projects to [c | k_rope], and `kv_norm` norms c. `gate` gives a number for each
    head, or for each of its elements, whose sigmoid multiplies the results of the head. `sinks`,
    float32[heads], are scores of each head that take part in the softmax only. With `top_k`, tokens
    see so many positions at most, which the indexer chose here, or in the last layer that has one.
    """

    window = 0

    def __init__(
        self,
        spec: MLASpec,
        *,
        q: Linear,
        kv_a: Linear,
        kv_norm: RMSNorm,
        up: UpProjection,
        output: Linear,
        rope: Rope,
        q_a: Linear | None = None,
        q_norm: RMSNorm | None = None,
        indexer: Indexer | None = None,
        top_k: int = 0,
        gate: Linear | None = None,
        sinks: torch.Tensor | None = None,
        switches: Switches = Switches(),
    ):
        self.spec, self.q, self.kv_a, self.kv_norm, self.up = spec, q, kv_a, kv_norm, up
        self.output, self.rope, self.q_a, self.q_norm = output, rope, q_a, q_norm
        self.indexer, self.top_k, self.switches = indexer, top_k, switches
        self.gate, self.sinks = gate, sinks

    @property
    def _index_width(self) -> int:
        return 0 if self.indexer is None else self.indexer.kept_length

    def new_storage(
        self, n_rows: int, settings: CacheSettings, device: torch.device
    ) -> LatentStorage:
        """Return memory for `n_rows` positions."""
        width = self.spec.cache_width
        return LatentStorage.make(n_rows, width, self._index_width, settings, device)

    def new_state(self, storage: Storage | None, table: Table, device: torch.device) -> LatentCache:
        """Return what one sequence has in `storage`, which `new_storage` made."""
        return LatentCache(storage, table)  # pyright: ignore[reportArgumentType]  see there

    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of `capacity` positions takes."""
        return capacity * LatentStorage.bytes_per_token(
            self.spec.cache_width, self._index_width, settings
        )

    def score_bytes(self, rows: int, keys: int, precision: str) -> int:
        """Return the bytes of latent vectors, of the keys and values that the naive form computes
        from them, and of scores.
        """
        s = self.spec
        latent = 4 * keys * s.cache_width
        if rows < s.absorb:
            return latent + 2 * max(_SCORES_MIB << 20, 4 * s.heads * keys)
        heads = self._heads_at_a_time(keys)
        return latent + heads * (self._naive_bytes(keys) + 8 * rows * keys)

    @property
    def pair_flop(self) -> float:
        """Return the operations of a score and of adding a value, for all heads, in the form that
        takes fewer of them.
        """
        return 2.0 * self.spec.heads * (self.spec.key_length + self.spec.value_length)

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations for n tokens after n_past others; the indexer looks at all
        positions.
        """
        found = self.pair_flop * pairs(n_past, n, self.top_k)
        if self.indexer is not None:
            s = self.indexer.spec
            found += 2.0 * s.heads * s.key_length * pairs(n_past, n)
        return found

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of latent vectors that tokens see, and of all keys of the indexer."""
        latent = LatentStorage.bytes_per_token(self.spec.cache_width, 0, settings)
        index = self.state_bytes(1, settings) - latent
        return latent * pairs(n_past, n, self.top_k) + index * pairs(n_past, n)

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width]; rows as `batch` says."""
        q_latent = x if self.q_a is None else self._normed(self.q_a(x))
        q, rows = self._project(x, q_latent, batch)
        found = Index.of(self.indexer, x, q_latent, batch) if self.indexer is not None else None
        sequences = latent_rows(rows, found, batch)
        if self.top_k and self.indexer is None:
            chosen = batch.scratch["selection"]
            for sequence, mask in zip(sequences, chosen, strict=True):
                sequence.seen = None if mask is None else mask.to(x.device)
        elif self.top_k:
            batch.scratch["selection"] = [sequence.seen for sequence in sequences]
        mixed = self._mix(q, sequences)
        if self.gate is not None:
            mixed = mixed * self.gate(x).sigmoid().unflatten(-1, (self.spec.heads, -1))
        return self.output(mixed.reshape(len(x), self.spec.heads * self.spec.value_length))

    def _normed(self, q: torch.Tensor) -> torch.Tensor:
        return q if self.q_norm is None else self.q_norm(q)

    def _project(
        self, x: torch.Tensor, q_latent: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries float32[rows, heads, rope + nope] and what the cache holds, float32[rows,
        rope + rank]. The rotated elements come first in both.
        """
        s, angles = self.spec, batch.angles(self.rope) if self.spec.rope_length else None
        q = self.q(q_latent).view(len(x), s.heads, s.key_length)
        if angles is not None:
            turned = self.rope(q[..., s.nope_length :], angles)
            q = torch.cat([turned, q[..., : s.nope_length]], dim=-1)
        if s.temperature is not None:
            q = q * temperature(s.temperature, batch.positions)[:, None, None]
        both = self.kv_a(x)
        c = self.kv_norm(both[:, : s.kv_rank])
        self.up.observe(c)
        if angles is None:
            return q, c
        k_rope = self.rope(both[:, None, s.kv_rank :], angles)[:, 0]
        return q, torch.cat([k_rope, c], dim=-1)

    def _mix(self, q: torch.Tensor, sequences: list[LatentRows]) -> torch.Tensor:
        """Return the results of all heads, float32[rows, heads, value_length]."""
        s = self.spec
        few = [
            x for x in sequences if x.span.stop - x.span.start < s.absorb or self.up.absorbs_only
        ]
        if len(few) == len(sequences):
            return self._absorbed(q, few)
        mixed = q.new_empty(len(q), s.heads, s.value_length)
        if few:  # in one product for all of them
            picked = torch.cat([torch.arange(x.span.start, x.span.stop) for x in few])
            mixed[picked] = self._absorbed(q, few, picked)
        for sequence in sequences:
            if sequence not in few:
                mixed[sequence.span] = self._naive(q[sequence.span], sequence)
        return mixed

    def _naive(self, q: torch.Tensor, sequence: LatentRows) -> torch.Tensor:
        """Attend with the keys and values of all heads."""
        s, rows = self.spec, sequence.rows
        if sequence.block:
            rows = hadamard(rows, sequence.block)
        step = self._heads_at_a_time(len(rows))
        mixed = q.new_empty(len(q), s.heads, s.value_length)
        for first in range(0, s.heads, step):
            heads = slice(first, first + step)
            sinks = None if self.sinks is None else self.sinks[heads]
            mixed[:, heads] = self._naive_heads(q[:, heads], rows, heads, sequence.seen, sinks)
        return mixed

    def _heads_at_a_time(self, keys: int) -> int:
        """Return for how many heads keys and values of `keys` positions fit the buffer."""
        most = (self.switches.attention_buffer or _BUFFER_MIB) << 20
        return max(1, min(self.spec.heads, most // max(1, self._naive_bytes(keys))))

    def _naive_bytes(self, keys: int) -> int:
        """Return the bytes of the keys and values of one head, and of what they are joined from."""
        s = self.spec
        return 4 * keys * (s.nope_length + s.value_length + 2 * max(s.key_length, s.value_length))

    def _naive_heads(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        heads: slice,
        seen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with some heads, for q float32[n, heads, key_length] and sinks of these, and rows
        of the cache.
        """
        s = self.spec
        k, v = self.up.keys_and_values(rows[:, s.rope_length :], heads)
        k_rope = rows[:, None, : s.rope_length].expand(-1, q.shape[1], -1)
        k = torch.cat([k_rope, k], dim=-1)
        if not self.switches.flash_attention or sinks is not None:
            return attend_with_scores(
                q[None],
                k[None],
                v[None],
                s.scale,
                self.switches.attention_buffer,
                sinks=sinks,
                mask=seen,
            )[0]
        # Kernels without a matrix of scores want keys and values of one length.
        missing = max(0, k.shape[-1] - v.shape[-1])
        found = attend(q[None], k[None], F.pad(v, (0, missing))[None], s.scale, mask=seen)
        return found[0][..., : s.value_length]

    def _absorbed(
        self, q: torch.Tensor, sequences: list[LatentRows], picked: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to latent vectors with the queries of `sequences`, the rows `picked` of q (None:
        all of them).
        """
        s = self.spec
        q = q if picked is None else q[picked]
        q = torch.cat([q[..., : s.rope_length], self.up.absorbed(q[..., s.rope_length :])], dim=-1)
        mixed, row = [], 0
        for sequence in sequences:
            n = sequence.span.stop - sequence.span.start
            mixed.append(self._attend_latent(q[row : row + n], sequence))
            row += n
        return self.up.results(mixed[0] if len(mixed) == 1 else torch.cat(mixed))

    def _attend_latent(self, q: torch.Tensor, sequence: LatentRows) -> torch.Tensor:
        """Return mixtures of latent vectors float32[n, heads, rank] for q float32[n, heads, rope +
        rank], in pieces whose scores fit a fixed amount of memory.
        """
        s, (n, total), block = self.spec, (len(q), len(sequence.rows)), sequence.block
        values = sequence.rows if block else sequence.rows[:, s.rope_length :]
        q, seen = (hadamard(q, block) if block else q) * s.scale, sequence.seen
        if seen is None and n > 1:
            seen = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
        most = 0 if self.switches.flash_attention else self.switches.attention_buffer
        step = max(1, ((most or _SCORES_MIB) << 20) // (4 * s.heads * total))
        mixed = q.new_empty(n, s.heads, values.shape[1])
        for first in range(0, n, step):
            piece = slice(first, first + step)
            scores = q[piece] @ sequence.rows.T
            if seen is not None:
                scores.masked_fill_(~seen[piece, None], float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks[:, None].expand(len(scores), -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            mixed[piece] = scores.softmax(dim=-1)[..., :total] @ values
        return hadamard(mixed, block)[..., s.rope_length :] if block else mixed

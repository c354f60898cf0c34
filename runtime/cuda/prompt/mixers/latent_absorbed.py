"""Latent attention of a prompt in the absorbed form, with queries that multiply latent vectors: to
the positions that an indexer has chosen; of few rows to all before them; and with scores in memory
while observers read the inputs of `attn_k_b` and `attn_v_b`, which the naive form does not have.

Both forms cost in proportion to the positions before. The naive one computes keys and values of all
heads with 2 (nope + value) rank operations for each position and head, whatever the number of
queries, and then takes 2 (nope + rope + value) for each query; the absorbed one 2 (rope + 2 rank)
for each query, and nothing else: in DeepSeek's models 262,144 and 640 against 2,176. So up to 171
queries would be less work in the absorbed form; 71, as its kernels multiply queries and
probabilities in two parts each.
"""

from __future__ import annotations

import torch

from .....cuda_kernels.attention import mla as attention_mla
from .....cuda_kernels.attention import mla_shape
from .....cuda_kernels.attention.mla import LatentRows
from .....cuda_kernels.attention.mla_shape import MOST_ROWS, MOST_SPLITS, PAIRS, LatentShape
from .....cuda_kernels.attention.shape import shared_limit
from ....layers.latent import PerHead
from ....layers.mla import MLA
from ....layers.specs import MLASpec
from ....weights.stacked_linear import HeadLinear
from ....weights.taps import GroupedRows
from ...common.context import Context
from .scores import attend_in_memory

CHOSEN_ROWS = 512  # rows at a time that attend to chosen positions
_LOG2E = 1.4426950408889634

# Measured by benchmarks/latent_prompts.py, see docs/benchmarks/cuda-history/attention.md.
FEWEST_KEYS = 1 << 19  # positions times heads: below, launches take longer than the naive form
KEYS_OF_QUERY = 1 << 15  # for each query, for the same reason
MOST_QUERIES = 64

forced: bool | None = None  # for benchmarks and tests: the absorbed form (True), or the naive one


def is_absorbed(n_queries: int, n_positions: int, heads: int) -> bool:
    """Return whether `n_queries` rows of a sequence attend in the absorbed form to `n_positions`,
    their own included.
    """
    if forced is not None:
        return forced
    keys = n_positions * heads
    return keys >= FEWEST_KEYS and n_queries <= min(MOST_QUERIES, keys // KEYS_OF_QUERY)


def buffers_of_rows(s: MLASpec) -> dict[str, int]:
    """Return the bytes of the buffers of `AbsorbedRows.to_all` for MOST_QUERIES rows."""
    pairs = MOST_QUERIES * s.heads
    # `splits_of` leaves as many blocks as a device has multiprocessors, or one for every tile.
    parts = max(MOST_SPLITS, -(-MOST_ROWS * s.heads // PAIRS))
    return {
        "partial": parts * PAIRS * (s.kv_rank + 2) * 4,
        "two parts of queries": (pairs + PAIRS) * 2 * s.cache_width * 2,
        "absorbed results": pairs * s.value_length * 4,
    }


class AbsorbedRows:
    """The absorbed form of one module. Queries are half[n, heads, nope + rope], rotated; latent
    vectors half[positions, rope + rank]; `matrices` are W_k transposed, [heads, rank, nope], and
    W_v, [heads, value, rank]; results go to out half[n, heads * value].
    """

    def __init__(self, m: MLA, context: Context):
        self.m, self.context = m, context
        self._of_rows: dict[tuple[torch.dtype, int], LatentRows | None] = {}

    def shape(self, type: str, rows: int, half: torch.dtype = torch.float16) -> LatentShape:
        """Return the shape of the kernels for latent vectors of a type and so many rows."""
        s = self.m.spec
        sizes = s.nope_length, s.rope_length, s.kv_rank, s.value_length
        return LatentShape(rows, s.heads, *sizes, type, half, chosen=self.m.top_k)

    def has_kernels(self, dtype: torch.dtype, n: int) -> bool:
        """Return whether `to_all` takes n rows of queries and latent vectors of a dtype."""
        return self._kernels(dtype, n) is not None

    def _kernels(self, dtype: torch.dtype, n: int) -> LatentRows | None:
        rows, device = min(n, MOST_ROWS), self.context.device
        if (dtype, rows) not in self._of_rows:
            shape = self.shape(_type(dtype), rows, dtype)
            fits = not self.m.top_k and mla_shape.fits(shape, shared_limit(device))
            self._of_rows[dtype, rows] = LatentRows(shape, device) if fits else None
        return self._of_rows[dtype, rows]

    def to_all(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        matrices: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Let rows of one sequence at `positions`, the last ones of `rows`, attend to all up to
        their own: eight at a time by the kernels of decoding steps. The last eight overlap with
        those before them where the number is no multiple of eight. For what `has_kernels`.
        """
        kernels, (w_k, w_v) = self._kernels(rows.dtype, len(q)), matrices
        assert kernels is not None
        shape = kernels.shape
        # Buffers that grow from pass to pass would void the graphs of other rows.
        for name, n_bytes in buffers_of_rows(self.m.spec).items():
            self.context.buffer(name, (n_bytes,), torch.uint8)
        splits = attention_mla.splits_of(shape, len(rows), rows.device)
        parts = (shape.tiles * splits * shape.part_floats,)
        partial = self.context.buffer("partial", parts, torch.float32)
        found = self.context.buffer("absorbed results", out.shape, torch.float32)
        queries, values, positions = self._queries(q, w_k), w_v.contiguous(), positions.int()
        for begin in range(0, len(q), shape.rows):
            first = min(begin, len(q) - shape.rows)
            kernels(
                queries[first * shape.heads :],
                rows,
                positions[first:],
                values,
                partial,
                splits,
                found[first:],
            )
        out.copy_(found)

    def to_chosen(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        n_sequences: int,
        matrices: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Let rows of each sequence at `positions` attend to those of int32[rows of q, top_k]."""
        s, (w_k, w_v) = self.m.spec, matrices
        shape = self.shape(_type(rows.dtype), 1)
        results = out.view(n_sequences, -1, s.heads, s.value_length)
        every = q.unflatten(0, (n_sequences, -1))
        show_heads(self.m, "k_b", q[..., : s.nope_length], self.context)
        lists, positions = chosen.unflatten(0, (n_sequences, -1)), positions.int()
        for n, latents in enumerate(rows.chunk(n_sequences)):
            for first in range(0, every.shape[1], CHOSEN_ROWS):
                part = slice(first, first + CHOSEN_ROWS)
                mine = every[n, part]
                size = len(mine) * shape.row_tiles * shape.part_floats
                mixed = attention_mla.attend_chosen(
                    shape,
                    self._queries(mine, w_k),
                    latents,
                    lists[n, part],
                    positions[first : first + 1],
                    self.context.buffer("partial", (size,), torch.float32),
                )
                mixed = mixed.to(w_v.dtype)
                show_heads(self.m, "v_b", mixed, self.context)
                values = torch.bmm(mixed.transpose(0, 1), w_v.mT)
                results[n, part].copy_(values.transpose(0, 1))

    def _queries(self, q: torch.Tensor, w_k: torch.Tensor) -> torch.Tensor:
        """Return queries [rotated | W_k^T q], with the factor of exponentials to the base 2, in two
        parts, the rounded values and the rounding errors: [n * heads + PAIRS, 2, rope + rank].
        """
        s = self.m.spec
        inner = torch.bmm(q[..., : s.nope_length].transpose(0, 1), w_k.mT).transpose(0, 1)
        halves = torch.cat([q[..., s.nope_length :], inner], -1)
        whole = halves.float().mul_(s.scale * _LOG2E).flatten(0, 1)
        shape = (len(whole) + PAIRS, 2, s.cache_width)
        both = self.context.buffer("two parts of queries", shape, q.dtype)
        rounded, errors = both[: len(whole)].unbind(1)
        rounded.copy_(whole)
        errors.copy_(whole.sub_(rounded))
        return both


def _type(dtype: torch.dtype) -> str:
    return "F16" if dtype == torch.float16 else "BF16"


def attend_shown(
    m: MLA,
    q: torch.Tensor,
    rows: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    n_sequences: int,
    out: torch.Tensor,
    context: Context,
) -> None:
    """Write the results of all heads to out half[rows of q, heads * value length] in the absorbed
    form, with scores in memory, and show its inputs.

    q: half[n, heads, nope + rope], rotated. rows: half[positions, rope + rank] of all sequences.
    matrices: W_k transposed, [heads, rank, nope], and W_v, [heads, value, rank].
    """
    s, (w_k, w_v) = m.spec, matrices
    nope, turned = q.split([s.nope_length, s.rope_length], -1)
    show_heads(m, "k_b", nope, context)
    inner = torch.bmm(nope.transpose(0, 1), w_k.mT).transpose(0, 1)
    queries = torch.cat([turned, inner], -1).unflatten(0, (n_sequences, -1))
    keys = rows[:, None].unflatten(0, (n_sequences, -1))
    each = zip(queries, keys, keys[..., s.rope_length :], strict=True)
    mixed = torch.cat([attend_in_memory(*x, s.scale) for x in each])
    show_heads(m, "v_b", mixed, context)
    results = torch.bmm(mixed.transpose(0, 1), w_v.mT).transpose(0, 1)
    out.view(results.shape).copy_(results)


def show_heads(m: MLA, name: str, x: torch.Tensor, context: Context) -> None:
    """Show half[rows, heads, n], the input of `k_b` or `v_b`, row after row of each head."""
    if not context.taps.fast or not isinstance(m.up, PerHead):
        return
    linear: HeadLinear = getattr(m.up, name)
    ends = torch.arange(1, x.shape[1] + 1, dtype=torch.int32, device=x.device) * len(x)
    context.taps.show(linear.observed, x.transpose(0, 1).flatten(0, 1), GroupedRows(ends))

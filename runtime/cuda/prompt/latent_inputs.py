"""Inputs of the matrices of heads of latent attention, for observers: statistics of `attn_k_b` and
`attn_v_b` are those of the absorbed form, which prompts do not take otherwise.
"""

from __future__ import annotations

import torch

from ...layers.latent import PerHead
from ...layers.mla import MLA
from ...weights.stacked_linear import HeadLinear
from ...weights.taps import GroupedRows
from ..common.context import Context
from .scores import attend_in_memory


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

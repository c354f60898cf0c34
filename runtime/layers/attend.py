"""Softmax attention of queries to given keys and values: what a token sees, and the factors of
queries.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from . import many_rows
from .specs import Temperature


def temperature(t: Temperature, positions: torch.Tensor) -> torch.Tensor:
    """Return the factor of the query at each position, float32[n]."""
    steps = torch.div(positions + t.offset, t.original_context, rounding_mode="floor")
    return 1 + t.scale * torch.log1p(steps.float())


def visible(n: int, total: int, window: int, device: torch.device) -> torch.Tensor | None:
    """bool[n, total]: whether each of the last n of `total` positions sees each of them; None if
    all see all.
    """
    if n == 1 and not 0 < window < total:
        return None
    seen = torch.ones(n, total, dtype=torch.bool, device=device).tril(total - n)
    return seen.triu(total - n - window + 1) if 0 < window < total else seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int = 0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32[sequences, n, heads, value_length] for the last n of N positions: q [sequences, n,
    heads, key_length], k and v [sequences, N, kv_heads, ...]. `mask` bool[n, N] replaces the causal
    one.
    """
    n, total = q.shape[1], k.shape[1]
    if mask is None and (found := many_rows.attend(q, k, v, scale, window)) is not None:
        return found
    # `is_causal` would line up the first query with the first key.
    causal = mask is None and 1 < n == total and not 0 < window < total
    if mask is None and not causal:
        mask = visible(n, total, window, q.device)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


def attend_with_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    most_mib: int = 0,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as `attend` does, with the matrix of scores in memory: of all heads, or of as many at
    a time as fit `most_mib` MiB (at least one). softcap, sinks: those of `AttentionSpec`.
    """
    n, total, n_heads, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    step = (
        n_heads
        if most_mib == 0
        else max(1, min(n_heads, (most_mib << 20) // (4 * q.shape[0] * n * total)))
    )
    if mask is None:
        mask = visible(n, total, window, q.device)
    mixed = q.new_empty(*q.shape[:3], v.shape[-1])
    for first in range(0, n_heads, step):
        heads = torch.arange(first, min(first + step, n_heads), device=q.device)
        keys, values = (x[:, :, heads // group].transpose(1, 2) for x in (k, v))
        scores = (q[:, :, heads].transpose(1, 2) * scale) @ keys.transpose(-1, -2)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill_(~mask, float("-inf"))
        if sinks is None:
            shares = scores.softmax(dim=-1)
        else:
            sink = sinks[heads][None, :, None, None].expand(*scores.shape[:3], 1)
            shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        mixed[:, :, heads] = (shares @ values).transpose(1, 2)
    return mixed

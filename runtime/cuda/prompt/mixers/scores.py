"""Attention of the rows of a prompt to keys and values in half precision: flash attention where
there is one, else scores in memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from .....cuda_kernels.prompt import attention as prompt_attention
from .....cuda_kernels.prompt import flash as prompt_flash
from .....cuda_kernels.prompt import flash_plan
from .....cuda_kernels.prompt import rows as prompt_rows
from ....layers.specs import AttentionSpec

CUDNN_ROWS = 2048  # rows of a pass from which on planning cuDNN's attention pays
SCORE_BYTES = 128 << 20  # of scores in memory
_FLASH_HEAD = 256  # elements of a head for which torch has flash attention, at most


def has_flash(s: AttentionSpec, device: torch.device) -> bool:
    """Return whether there is flash attention for these heads on a device."""
    if flash_plan.fits(s.key_length, s.value_length, device):
        return True
    return not s.softcap and max(s.key_length, s.value_length) <= _FLASH_HEAD


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    *,
    first: int = 0,
) -> torch.Tensor:
    """Return [S, n, heads, value_length] in the dtype of q, for half[S, n, heads, key_length] and
    [S, N, kv_heads, ...]: each of the last n of N positions sees itself and all before it, or a
    window, or a chunk; `first` is then the first position. With `out`, half of as many elements,
    write there, times what `gates` of its dtype say if there are any, and return it.

    On Hopper by kernels of our own, elsewhere by those of torch (`_by_torch`). Heads that neither
    takes, or scores with a cap, have their scores in memory.
    """
    shape = (*q.shape[:3], s.value_length)
    if s.chunked:
        return _by_chunk(q, k, v, s, sinks, out, gates, first)
    if flash_plan.fits(s.key_length, s.value_length, q.device):
        mixed = q.new_empty(shape) if out is None else out.view(shape)
        prompt_flash.flash_attention(
            q,
            k,
            v,
            mixed,
            scale=s.scale,
            window=s.window,
            softcap=s.softcap,
            sinks=sinks,
            gates=None if gates is None else gates.view(*shape[:3], -1),
            softplus=s.softplus_gates,
        )
        return mixed if out is None else out
    if not has_flash(s, q.device):
        one_by_one = zip(q, k, v, strict=True)
        mixed = torch.stack(
            [
                attend_in_memory(*x, s.scale, window=s.window, softcap=s.softcap, sinks=sinks)
                for x in one_by_one
            ]
        )
    else:
        mixed = _by_torch(q, k, v, s, sinks)
    if out is None:
        return mixed
    prompt_rows.converted(mixed if gates is None else gated(mixed, gates, s), out)
    return out


def _by_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: AttentionSpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    gates: torch.Tensor | None,
    first: int,
) -> torch.Tensor:
    """Return what `attend` does: the queries of a chunk see keys from its first one on."""
    start, whole = first + k.shape[1] - q.shape[1], replace(s, window=0, chunked=False)
    pieces = s.in_chunks(start, first + k.shape[1])
    if len(pieces) == 1 and pieces[0][1] == first:
        return attend(q, k, v, whole, sinks, out, gates)
    found = []
    for at, seen in pieces:
        keys = slice(seen - first, at.stop - first)
        parts = q[:, at.start - start : at.stop - start], k[:, keys], v[:, keys]
        queries, seen_k, seen_v = (x.contiguous() for x in parts)
        found.append(attend(queries, seen_k, seen_v, whole, sinks))
    mixed = torch.cat(found, dim=1)
    if out is None:
        return mixed
    prompt_rows.converted(mixed if gates is None else gated(mixed, gates, s), out)
    return out


def gated(mixed: torch.Tensor, gates: torch.Tensor, s: AttentionSpec) -> torch.Tensor:
    """Return results of attention [rows, heads, length] times what their gates say, of which a head
    has `length` or one.
    """
    return mixed.reshape(*gates.shape[:2], -1) * s.opened(gates)


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the result in the dtype of q.

    FlashAttention-2 (Dao, 2023): causal masks end in the lower right corner, grouped heads are read
    as they are, keys and values have one length. cuDNN's kernel is faster on new devices, but
    takes up to a second to plan, and has no such corner.
    """
    if (
        not 0 < s.window < k.shape[1]
        and q.shape[1] == k.shape[1]
        and len(q) * q.shape[1] >= CUDNN_ROWS
        and _cudnn_takes(q, k, v)
    ):
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        mixed, log_sums = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *by_head, None, sinks is not None, 0.0, True, False, scale=s.scale
        )[:2]
        mixed = mixed.transpose(1, 2)
    else:
        longest = max(s.key_length, s.value_length)
        mixed, log_sums = torch.ops.aten._flash_attention_forward(
            *(
                x if x.shape[3] == longest else F.pad(x, (0, longest - x.shape[3]))
                for x in (q, k, v)
            ),
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            True,
            False,
            scale=s.scale,
            window_size_left=s.window - 1 if s.window else None,
            window_size_right=0 if s.window else None,
        )[:2]
        mixed = mixed[..., : s.value_length]
    if sinks is not None:
        prompt_rows.take_sinks(mixed, log_sums.reshape(len(mixed), s.heads, -1), sinks)
    return mixed


def attend_in_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return half[n, heads, value_length] for the last n of N positions of a sequence, with scores
    in memory: q half[n, heads, key_length], k and v half[N, kv_heads, ...], sinks float32[heads].
    As many queries at a time as `SCORE_BYTES` allow; keys that none of them sees are left out.
    """
    (n, heads, _), (total, kv_heads, _) = q.shape, k.shape
    step = max(1, SCORE_BYTES // (4 * heads * total))
    step, out = step // 16 * 16 or step, q.new_empty(n, heads, v.shape[2])
    for first in range(0, n, step):
        queries = q[first : first + step].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        rows = queries.shape[2]
        seen = total - n + first  # the last key of the first query
        begin = max(0, seen - window + 1) if window else 0
        keys, values = (x[begin : seen + rows].transpose(0, 1) for x in (k, v))
        scores = torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2), out_dtype=torch.float32)
        shares = torch.empty_like(scores, dtype=q.dtype)
        prompt_attention.softmax_scores(
            scores,
            shares,
            rows,
            seen - begin,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        mixed = torch.bmm(shares, values).unflatten(1, (-1, rows))
        out[first : first + rows].unflatten(1, (kv_heads, -1)).copy_(mixed.permute(2, 0, 1, 3))
    return out


def _cudnn_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))

"""Layers of many rows on the CPU in compiled code, where the reference path has several passes over
memory for each: float32 as there, with other orders of additions.

Layers use it within `compiled_rows()`, for sizes that it has code for; each function returns None
for others.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn import functional as F

from ..weights.linear import Linear
from ..weights.rounded import Rounded

LEAST_ROWS = 16
# Multiplications of a thread between two looks at Ctrl-C: a second or less. Fewer leave threads
# with too few tiles to share them evenly.
PATIENCE = 10**10


class _Chosen(threading.local):
    compiled = False


_chosen = _Chosen()


@contextmanager
def compiled_rows() -> Iterator[None]:
    """Use compiled code while the context is open, in this thread."""
    before, _chosen.compiled = _chosen.compiled, True
    try:
        yield
    finally:
        _chosen.compiled = before


def usable(x: torch.Tensor, *sizes: int) -> bool:
    """Return whether compiled code is used for rows x, with dimensions of these sizes."""
    return (
        _chosen.compiled
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and len(x) >= LEAST_ROWS
        and not any(size % 16 for size in sizes)
    )


@functools.cache
def _operations():
    from ..simd import threads
    from ..simd.prompt import attention, rows

    return rows, attention, threads


def ask_for_operations(
    rotations: Iterable[bool], recurrent: Collection[int], gates: Collection[bool]
) -> None:
    """Ask for the operations of layers (see `simd.operations.rehearsed`): rotations that split
    heads in halves or not, the elements of a value in recurrent layers, and whether products with
    what gates let through are in 8 bits or not.
    """
    rows, attention, _ = _operations()
    rows.norm()
    attention.attention()
    if True in gates:
        from ..simd.prompt.rounded import gated_rounding

        gated_rounding()
    if False in gates:
        rows.gate()
    for split_halves in rotations:
        rows.rotation(split_halves)
    if recurrent:
        from ..simd.prompt import delta

        rows.convolution()
        for size in recurrent:
            delta.rule(size)


def run(operation: int, *arguments: int) -> None:
    """Run an operation with these arguments, on all threads."""
    _, _, threads = _operations()
    program = threads.Program([(operation, np.array(arguments, dtype=np.int64))])
    threads.run(program, torch.get_num_threads())


def total(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return h + y, both float32[rows, width], in the memory of y where compiled code is used."""
    return y.add_(h) if usable(h) else h + y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Return the RMS norm of x float32[..., n]."""
    n = x.shape[-1]
    if not usable(x, n):
        return None
    # Heads may be parts of longer rows.
    x = x if x.ndim in (2, 3) and x.stride(-1) == 1 else x.contiguous()
    heads, step = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, n)
    token = x.stride(0) if x.ndim in (2, 3) else n
    (rows, _, _), out = _operations(), x.new_empty(x.shape)
    run(
        rows.norm(),
        *(x.data_ptr(), x.numel() // n, n, weight.contiguous().data_ptr(), out.data_ptr()),
        *(int(np.float32(eps).view(np.int32)), heads, step, token),
    )
    return out


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Return x float32[sequences, n, heads, d] divided by the root of the sum of its squares over
    the last dimension and eps.
    """
    n = x.shape[-1]
    if not usable(x[0], n):
        return None
    found = rms_norm(x.flatten(0, 1), torch.full((n,), n**-0.5), eps / n)
    return None if found is None else found.view(x.shape)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, n_rot: int, split_halves: bool
) -> torch.Tensor | None:
    """Return x float32[rows, heads, n] with the first n_rot elements of heads rotated by
    float32[rows, n_rot / 2].
    """
    if x.ndim != 3 or not usable(x, x.shape[-1], n_rot // 2):
        return None
    x, (rows, _, _) = x.contiguous(), _operations()
    cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
    operation = rows.rotation(split_halves)
    addresses = (cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    run(operation, x.data_ptr(), *x.shape, n_rot, *addresses)
    return out


def gate_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate) * up for float32[rows, n], in the memory of the gate."""
    if not usable(gate, gate.shape[-1]) or gate.ndim != 2 or gate.stride(1) + up.stride(1) != 2:
        return None
    rows, _, _ = _operations()
    run(rows.gate(), gate.data_ptr(), up.data_ptr(), gate.stride(0), up.stride(0), *gate.shape)
    return gate


def gated_product(linear: Linear, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """Return the product of silu(gate) * up float32[n, columns] with a matrix, if that is in
    8 bits.
    """
    if not usable(gate) or not linear.multiplies_rounded(len(gate)):
        return None
    return linear.of_rounded(Rounded.gated(gate, up))


def convolve_silu(
    before: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor | None:
    """Return silu of the causal convolution of each channel, float32[sequences, n, channels], for
    x float32[sequences, n, channels] after `before` float32[sequences, taps - 1, channels], and
    weights float32[channels, taps].
    """
    n, channels = x.shape[1:]
    if n < LEAST_ROWS or not usable(x[0], channels):
        return None
    by_tap, (rows, _, _) = weights.t().contiguous(), _operations()
    x, before, out = x.contiguous(), before.contiguous(), x.new_empty(x.shape)
    for one, earlier, to in zip(x, before, out, strict=True):
        addresses = (one.data_ptr(), by_tap.data_ptr(), to.data_ptr())
        run(rows.convolution(), *addresses, n, weights.shape[1], channels, earlier.data_ptr())
    return out


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
    *,
    tiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what the functions of `delta_rule` return. q and k may have fewer heads than v: tiled
    as `DeltaNetSpec` says.
    """
    if not usable(q[0], v.shape[-1]) or q.shape[-1] % 4:
        return None
    from ..simd.prompt import delta

    (sequences, n, heads, dv), (key_heads, d) = v.shape, q.shape[2:]
    if v.stride()[2:] != (dv, 1) or (sequences > 1 and v.stride(0) != n * v.stride(1)):
        v = v.contiguous()
    q, k, decay, beta = (x.contiguous() for x in (q, k, decay, beta))
    memory, out = memory.clone(memory_format=torch.contiguous_format), v.new_empty(v.shape)
    addresses = (x.data_ptr() for x in (q, k, v, decay, beta, memory, out))
    sizes = (sequences, n, heads, d, dv, key_heads, int(tiled), v.stride(1))
    run(delta.rule(dv), *addresses, *sizes)
    return out, memory


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor | None:
    """Return causal attention float32[sequences, n, heads, dv]: q float32[sequences, n, heads, d]
    of the last n of N positions, k float32[sequences, N, kv_heads, d] and v float32[sequences, N,
    kv_heads, dv].
    """
    if not usable(q[0]):
        return None
    found = [_attend(*one, scale, window) for one in zip(q, k, v, strict=True)]
    return found[0][None] if len(found) == 1 else torch.stack(found)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    _, attention, _ = _operations()
    (n, heads, d), (total, kv_heads, dv), keys = q.shape, v.shape, attention.KEYS
    panels = -(-total // keys)
    pad, wide = panels * keys - total, -(-dv // keys) * keys
    k = F.pad(k, (0, 0, 0, 0, 0, pad)) if pad else k
    panels_of_keys = k.reshape(panels, keys, kv_heads, d).permute(2, 0, 3, 1).contiguous()
    v = F.pad(v, (0, wide - dv, 0, 0, 0, pad)) if pad or wide > dv else v
    values = v.transpose(0, 1).contiguous()
    out = torch.empty(n, heads, wide)
    size = -(-attention.scratch_bytes(wide) // 64) * 64
    scratch = torch.empty(torch.get_num_threads() * size, dtype=torch.uint8)
    group = heads // kv_heads
    for rows in _pieces(n, min(total, window or total) * heads * (d + wide)):
        some = q[rows].reshape(-1, kv_heads, group, d)
        queries = torch.empty(kv_heads, len(some) * group + attention.TILE, d)
        by_head = queries[:, : len(some) * group].unflatten(1, (len(some), group))
        torch.mul(some.transpose(0, 1), scale, out=by_head)
        queries[:, len(some) * group :] = 0
        run(
            attention.attention(),
            *(x.data_ptr() for x in (queries, panels_of_keys, values)),
            *(kv_heads, len(some), group, d, wide, panels, total - n + rows.stop, window),
            out[rows].data_ptr(),
            scratch.data_ptr(),
            size,
        )
    return out if wide == dv else out[..., :dv]


def _pieces(n: int, multiplications: int) -> list[slice]:
    """Return the pieces of n queries that attention takes at a time, as Ctrl-C is not heard within
    one. multiplications: of a query. The queries of a tile stay together, so that sums do not
    depend on pieces.
    """
    _, attention, _ = _operations()
    most = PATIENCE * torch.get_num_threads() // multiplications
    step = max(1, most // attention.TILE) * attention.TILE
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]

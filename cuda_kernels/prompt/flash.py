"""Flash attention of prompts on Hopper's tensor cores, at torch level: see `prompt/flash.cu`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ShapeError
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from . import flash_plan
from .flash_plan import PLANS, Plan, division, plan_of
from .overlap import overlap
from .rows import HALVES, short

ARCHS = ("sm_90a",)
_L2_BYTES = 32 << 20  # of keys and values that tiles of different heads read at the same time


@functools.cache
def spec(
    key: int,
    value: int,
    half: torch.dtype,
    out: torch.dtype,
    capped: bool,
    plan: Plan,
    softplus: bool = False,
) -> KernelSpec:
    """Return the kernel for heads of these lengths, with keys and values of a dtype, results of
    another one, and scores with a cap or without. softplus: what gates multiply by.
    """
    name = f"prompt_flash_{key}_{value}_{short(half)}_{short(out)}_{plan.groups}x{plan.positions}"
    return KernelSpec(
        f"{name}{'_capped' * capped}{'_softplus' * softplus}",
        ("prompt/flash.cu",),
        (
            ("HALF", str(HALVES[half])),
            ("OUT_HALF", str(HALVES[out])),
            ("KEY", str(key)),
            ("VALUE", str(value)),
            ("CAPPED", str(int(capped))),
            ("SOFTPLUS", str(int(softplus))),
            ("GROUPS", str(plan.groups)),
            ("POSITIONS", str(plan.positions)),
        ),
        ("flash_attention", "flash_join"),
        ARCHS,
    )


def specs() -> list[KernelSpec]:
    """Return the kernels of usual caches and precisions. Others are compiled on first use."""
    bf16, f16 = torch.bfloat16, torch.float16
    return [
        *(
            spec(*lengths, half, out, False, plan)
            for lengths, plans in PLANS.items()
            for plan in plans
            for half, out in ((f16, bf16), (f16, f16), (bf16, bf16))
        ),
        *(spec(n, n, f16, bf16, True, *PLANS[n, n]) for n in (128, 256)),
        spec(128, 128, f16, bf16, False, *PLANS[128, 128], softplus=True),
    ]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    softplus: bool = False,
    plan: Plan | None = None,
    parts: int | None = None,
) -> None:
    """Compute out half[S, n, heads, value], attention of the last n of N positions of S sequences:
    each sees itself and all before it, with a window only so many positions.

    q: half[S, n, heads, key], k: half[S, N, kv_heads, key] and v: half[S, N, kv_heads, value] of
    one dtype, heads one after the other. softcap: scores are softcap * tanh(score / softcap) if it
    is not 0. sinks: float32[heads], a further score of each head whose share is left out. gates, of
    the shape and dtype of out, or with one element for each head: results are multiplied by their
    sigmoid, with `softplus` by ln(1 + e^gate); tokens and heads may be further apart. parts: the
    positions of a tile are divided among so many blocks (default: as `division` has it). Raise
    ShapeError for what does not fit together.
    """
    tensors = (q, k, v, out)
    if any(x.data_ptr() % 16 for x in tensors):
        raise ShapeError("heads that do not begin at multiples of 16 bytes")
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(f"queries in {q.dtype}, keys in {k.dtype}, values in {v.dtype}")
    work = _work(
        tuple((x.shape, x.stride()) for x in tensors),
        (q.dtype, out.dtype),
        q.device,
        (scale, window, softcap),
        softplus,
        plan,
        parts,
    )
    partial = torch.empty(work.partial, device=q.device) if work.partial else None
    before, after = work.numbers
    gate_strides = _NO_GATES
    if gates is not None:
        sequence, _, head, one = gates.stride()
        token = _token_stride(gates.shape, gates.stride())
        of_heads = gates.shape == (*out.shape[:-1], 1)  # others are read in pairs
        regular = one == 1 and (len(gates) == 1 or sequence == gates.shape[1] * token)
        fits = of_heads or (gates.shape == out.shape and not (token % 2 or head % 2))
        if not regular or not fits or gates.dtype != out.dtype:
            raise ShapeError(f"gates {list(gates.shape)} of results {list(out.shape)}")
        gate_strides = np.int64(token), np.int64(head), np.int32(not of_heads)
    arguments = (*tensors, *before, partial, *after, sinks, gates, *gate_strides, _NONE)
    launch(
        function(work.kernels, "flash_attention", q.device),
        work.blocks,
        work.threads,
        *arguments,
        shared=work.shared,
        pdl=overlap(q.shape[0] * q.shape[1]),
    )
    if partial is not None:
        launch(
            function(work.kernels, "flash_join", q.device),
            work.joining,
            128,
            *arguments,
            pdl=overlap(q.shape[0] * q.shape[1]),
        )


_NONE, _NO_GATES = np.uint32(0), (np.int64(0), np.int64(0), np.int32(1))


class _Work(NamedTuple):
    """Launches for tensors of some shapes, which many layers have in common: blocks, threads and
    shared bytes of the first, blocks of the second; the numbers before and after `partial`.
    """

    kernels: KernelSpec
    blocks: int
    threads: int
    shared: int
    joining: int
    partial: int
    numbers: tuple[tuple[np.generic, ...], tuple[np.generic, ...]]


@functools.lru_cache(maxsize=256)
def _work(
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    numbers: tuple[float, int, float],
    softplus: bool,
    plan: Plan | None,
    parts: int | None,
) -> _Work:
    queries, keys, values, results = (shape for shape, _ in layouts)
    (n_sequences, n, heads, key), (_, total, kv_heads, value) = queries, values
    if (
        keys != (n_sequences, total, kv_heads, key)
        or results != (n_sequences, n, heads, value)
        or heads % kv_heads
        or n > total
    ):
        raise ShapeError(
            f"attention of {list(queries)} to keys {list(keys)} and values {list(values)}, to"
            f" {list(results)}"
        )
    if not all(_is_regular(shape, stride) for shape, stride in layouts):
        raise ShapeError("heads that do not follow each other, or sequences that do not")
    used, (scale, window, softcap) = plan or plan_of(queries, values, device), numbers
    work = division(queries, values, device, used)
    if parts is not None:
        work = work._replace(parts=parts)
    together = max(1, min(work.pairs, _L2_BYTES // (2 * total * (key + value))))
    sizes = (n, total, heads // kv_heads, kv_heads, n_sequences, together, work.parts)
    return _Work(
        spec(key, value, *dtypes, softcap > 0, used, softplus),
        min(work.pairs * work.rows // used.rows * work.parts, flash_plan.multiprocessors(device)),
        128 * (used.groups + 1),
        used.shared(key, value),
        -(-n_sequences * n * heads // 4),
        work.partial * (value + 2),
        (
            (*(np.int64(_token_stride(*layout)) for layout in layouts), *map(np.int32, sizes)),
            (np.int32(window), np.float32(scale), np.float32(softcap)),
        ),
    )


def _token_stride(shape: torch.Size, strides: tuple[int, ...]) -> int:
    """Return the elements from one token to the next, also that of another sequence. Where
    sequences have one token, torch may give any stride for it.
    """
    return strides[0] if shape[1] == 1 < shape[0] else strides[1]


def _is_regular(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Return whether heads follow each other in a token, and sequences too; and whether rows are
    multiples of 16 bytes.
    """
    (n_sequences, n, heads, length), (sequence, _, head, one) = shape, strides
    token = _token_stride(shape, strides)
    return (
        one == 1
        and (heads == 1 or head == length)
        and (n_sequences == 1 or sequence == n * token)
        and not (token % 8 or length % 8)
    )

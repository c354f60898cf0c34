"""Flash attention of prompts on Hopper's tensor cores, at torch level: see `prompt/flash.cu`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...errors import ShapeError
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .rows import HALVES, short

ARCHS = ("sm_90a",)
_FEW_TURNS = 3  # tiles of a multiprocessor, up to which these do not even out
_LEAST_BLOCKS = 4  # of positions, for a part of a tile
_L2_BYTES = 32 << 20  # of keys and values that tiles of different heads read at the same time


class Plan(NamedTuple):
    """How a kernel is compiled and launched: warpgroups that multiply, 64 rows each; positions of a
    block of keys and values, and blocks of them in shared memory; whether warpgroups multiply in
    turn.
    """

    groups: int
    positions: int
    ring: int = 2
    alternate: bool = True

    @property
    def rows(self) -> int:
        """Return the rows of a tile."""
        return 64 * self.groups

    @property
    def of_a_row(self) -> float:
        """Return the time of a row next to that with three warpgroups, for heads that have both
        (measured with heads of 64 elements).
        """
        return 1.0 if self.groups == 3 else 1.07

    def shared(self, key: int, value: int) -> int:
        """Return bytes: queries of a tile, the rings, the alignment."""
        panels_k, panels_v = -(-key // 64), -(-value // 64)
        rows = self.rows * panels_k + self.ring * self.positions * (panels_k + panels_v)
        return 128 * rows + 1024


# By elements of a key and of a value. Of several, `plan_of` takes the one with the least to do.
PLANS = {
    (32, 32): (Plan(3, 128),),
    (64, 64): (Plan(3, 128), Plan(2, 160)),
    (80, 80): (Plan(2, 128),),
    (96, 96): (Plan(2, 128),),
    (112, 112): (Plan(2, 128),),
    (128, 128): (Plan(2, 128),),
    (192, 128): (Plan(2, 128),),
    (192, 192): (Plan(2, 80),),
    (256, 256): (Plan(2, 80),),
}


def plan_of(queries: Sequence[int], values: Sequence[int], device: torch.device) -> Plan:
    """Return the plan for shapes [S, n, heads, key] and [S, N, kv_heads, value] by the rows that
    the busiest multiprocessor has to do: of few tiles, whole ones.
    """
    (n_sequences, n, heads, key), (_, _, kv_heads, value) = queries, values

    def cost(plan: Plan) -> float:
        tiles = n_sequences * kv_heads * -(-n * (heads // kv_heads) // plan.rows)
        turns = tiles / _multiprocessors(device)
        return (math.ceil(turns) if turns <= _FEW_TURNS else turns) * plan.rows * plan.of_a_row

    return min(PLANS[key, value], key=cost)


@functools.cache
def spec(
    key: int, value: int, half: torch.dtype, out: torch.dtype, capped: bool, plan: Plan
) -> KernelSpec:
    """Return the kernel for heads of these lengths, with keys and values of a dtype, results of
    another one, and scores with a cap or without.
    """
    groups, positions, ring, alternate = plan
    name = f"prompt_flash_{key}_{value}_{short(half)}_{short(out)}_{groups}x{positions}"
    return KernelSpec(
        f"{name}{'_capped' * capped}",
        ("prompt/flash.cu",),
        (
            ("HALF", str(HALVES[half])),
            ("OUT_HALF", str(HALVES[out])),
            ("KEY", str(key)),
            ("VALUE", str(value)),
            ("CAPPED", str(int(capped))),
            ("GROUPS", str(groups)),
            ("POSITIONS", str(positions)),
            ("RING", str(ring)),
            ("ALTERNATE", str(int(alternate))),
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
    ]


def fits(key: int, value: int, device: torch.device) -> bool:
    """Return whether `flash_attention` takes heads of these lengths on this device."""
    return (
        (key, value) in PLANS
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


class Division(NamedTuple):
    """How work is divided: rows of queries that share a head of keys, up to whole tiles; pairs of a
    sequence and a head of keys; the parts of the positions that a tile sees.
    """

    rows: int
    pairs: int
    parts: int

    @property
    def partial(self) -> int:
        """Return the floats that parts leave for each other, `value` and 2 of each row; 0 where
        nothing is divided.
        """
        return self.parts * self.pairs * self.rows if self.parts > 1 else 0


def division(
    queries: Sequence[int], values: Sequence[int], device: torch.device, plan: Plan
) -> Division:
    """Return the division for shapes [S, n, heads, key] and [S, N, kv_heads, value]: few queries
    occupy all multiprocessors by parts of the positions.
    """
    (n_sequences, n, heads, _), (_, total, kv_heads, _) = queries, values
    tiles, pairs = -(-n * (heads // kv_heads) // plan.rows), n_sequences * kv_heads
    blocks = -(-total // plan.positions)
    parts = min(_multiprocessors(device) // (tiles * pairs), blocks // _LEAST_BLOCKS)
    return Division(tiles * plan.rows, pairs, max(1, parts))


def partial_bytes(queries: Sequence[int], values: Sequence[int], device: torch.device) -> int:
    """Return the most bytes that `flash_attention` allocates for shapes as in `division`, with
    fewer tokens, or with some of the heads: few tiles are divided among all multiprocessors, where
    many are not divided.
    """
    (n_sequences, n, _, key), (_, total, kv_heads, value) = queries, values
    tiles, most = n_sequences * n * kv_heads, 0
    for plan in PLANS[key, value]:
        parts = -(-total // plan.positions) // _LEAST_BLOCKS
        if parts > 1:
            most = max(most, plan.rows * min(_multiprocessors(device), tiles * parts))
    return 4 * most * (value + 2)


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
    plan: Plan | None = None,
    parts: int | None = None,
) -> None:
    """Compute out half[S, n, heads, value], attention of the last n of N positions of S sequences:
    each sees itself and all before it, with a window only so many positions.

    q: half[S, n, heads, key], k: half[S, N, kv_heads, key] and v: half[S, N, kv_heads, value] of
    one dtype, heads one after the other. softcap: scores are softcap * tanh(score / softcap) if it
    is not 0. sinks: float32[heads], a further score of each head whose share is left out. gates, of
    the shape and dtype of out: results are multiplied by their sigmoid; tokens and heads may be
    further apart. parts: the positions of a tile are divided among so many blocks (default: as
    `division` has it). Raise ShapeError for what does not fit together.
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
        plan,
        parts,
    )
    partial = torch.empty(work.partial, device=q.device) if work.partial else None
    before, after = work.numbers
    gate_strides = _NO_GATES
    if gates is not None:
        sequence, _, head, one = gates.stride()
        token = _token_stride(gates.shape, gates.stride())
        regular = one == 1 and (len(gates) == 1 or sequence == gates.shape[1] * token)
        if (
            not regular
            or token % 2
            or head % 2
            or (gates.shape, gates.dtype) != (out.shape, out.dtype)
        ):
            raise ShapeError(f"gates {list(gates.shape)} of results {list(out.shape)}")
        gate_strides = np.int64(token), np.int64(head)
    arguments = (*tensors, *before, partial, *after, sinks, gates, *gate_strides, _NONE)
    launch(
        function(work.kernels, "flash_attention", q.device),
        work.blocks,
        work.threads,
        *arguments,
        shared=work.shared,
    )
    if partial is not None:
        launch(function(work.kernels, "flash_join", q.device), work.joining, 128, *arguments)


_NONE, _NO_GATES = np.uint32(0), (np.int64(0), np.int64(0))


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
        spec(key, value, *dtypes, softcap > 0, used),
        min(work.pairs * work.rows // used.rows * work.parts, _multiprocessors(device)),
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


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

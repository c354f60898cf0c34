"""How work of flash attention in prompts is divided among multiprocessors, see `flash`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_STAGES = 2  # blocks of keys and of values in shared memory
_FEW_TURNS = 3  # tiles of a multiprocessor, up to which these do not even out
_LEAST_BLOCKS = 4  # of positions, for a part of a tile


class Plan(NamedTuple):
    """How a kernel is compiled and launched: warpgroups that multiply, 64 rows each; positions of a
    block of keys and values.
    """

    groups: int
    positions: int

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
        rows = self.rows * panels_k + _STAGES * self.positions * (panels_k + panels_v)
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
        turns = tiles / multiprocessors(device)
        return (math.ceil(turns) if turns <= _FEW_TURNS else turns) * plan.rows * plan.of_a_row

    return min(PLANS[key, value], key=cost)


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
    parts = min(multiprocessors(device) // (tiles * pairs), blocks // _LEAST_BLOCKS)
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
            most = max(most, plan.rows * min(multiprocessors(device), tiles * parts))
    return 4 * most * (value + 2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count

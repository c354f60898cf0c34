"""Whether experts are split by hidden columns or as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

from ..weights.split_plan import ExpertMode
from .apportion import Balanced

ExpertChoice = Literal["auto", "columns", "whole"]

# A step's expert products take as long as the bytes that the busiest rank reads, and so much time
# for launches besides, in parts of the time that one GPU takes for all bytes.
_STEP_LATENCY = 1.0


def choose_mode(
    choice: ExpertChoice, shares: Sequence[float], n_units: int, n_experts: int, n_used: int
) -> ExpertMode:
    """Return how to split experts of `n_units` units of hidden columns, of which a token uses
    `n_used` of `n_experts`.

    Prompts use all experts, so that the busiest rank is the one with the largest part. The few
    tokens of a step use few experts: whole ones may all be on one rank. `auto` takes what is faster
    by the product of both.
    """
    if choice != "auto":
        return choice
    columns = _largest(Balanced(shares).units(n_units, ""), shares)
    counts = Balanced(shares).units(n_experts, "")
    whole = _largest(counts, shares)
    busiest = busiest_share(counts, n_used)
    if columns * (_STEP_LATENCY + columns) <= whole * (_STEP_LATENCY + busiest):
        return "columns"
    return "whole"


@cache
def busiest_share(counts: tuple[int, ...], n_used: int) -> float:
    """Return the expected part of a token's experts that are on the rank with most of them, if all
    experts are equally likely and rank r has counts[r].
    """
    n, total = sum(counts), 0.0
    everything = math.comb(n, n_used)
    below = 0.0
    for most in range(n_used + 1):
        # The number of choices with at most so many on each rank: a coefficient of a product.
        ways = [1] + [0] * n_used
        for count in counts:
            ways = [
                sum(
                    ways[used - here] * math.comb(count, here)
                    for here in range(min(most, used, count) + 1)
                )
                for used in range(n_used + 1)
            ]
        probability = ways[n_used] / everything
        total += most * (probability - below)
        below = probability
    return total / n_used


def _largest(counts: Sequence[int], shares: Sequence[float]) -> float:
    """Return the time of the slowest rank, where a rank with the share p works p * ranks as fast as
    the average; as a part of the time of one average rank for everything.
    """
    n = sum(counts)
    return max(
        count / n / (share * len(shares)) if share else (math.inf if count else 0.0)
        for count, share in zip(counts, shares, strict=True)
    )

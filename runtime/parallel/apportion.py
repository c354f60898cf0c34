"""How many units of a dimension each rank gets: heads, blocks of columns, experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ...errors import UsageError


class Apportion(Protocol):
    """Distributes the units of one layer after another, by `shares`, which add up to 1."""

    shares: tuple[float, ...]

    def units(self, n: int, key: str, size: float = 1.0) -> tuple[int, ...]:
        """Return how many of n units each rank gets. key: of what, such as `heads`; what one layer
        gives a rank too little of, later ones with this key give more. size: how much such a layer
        counts.
        """
        ...

    def count(self, n_bytes: Sequence[float]) -> None:
        """Say how many bytes of a tensor each rank got."""
        ...


class Balanced:
    """Largest remainders, with what is rounded carried to the next layer. Every rank with a share
    gets at least one unit if there are enough.
    """

    def __init__(self, shares: Sequence[float]):
        self.shares = tuple(shares)
        self._owed: dict[str, list[float]] = {}

    def units(self, n: int, key: str, size: float = 1.0) -> tuple[int, ...]:
        """Return how many of n units each rank gets; see `Apportion.units`. An empty key carries
        nothing.
        """
        owed = self._owed.setdefault(key, [0.0] * len(self.shares)) if key else None
        wanted = [
            max(0.0, n * (share + (owed[rank] / size if owed else 0.0)))
            for rank, share in enumerate(self.shares)
        ]
        least = 1 if n >= sum(share > 0 for share in self.shares) else 0
        found = [
            max(math.floor(want), least) if share else 0
            for want, share in zip(wanted, self.shares, strict=True)
        ]
        while sum(found) > n:
            over = [f - w if f > least else -math.inf for f, w in zip(found, wanted, strict=True)]
            found[_extreme(over)] -= 1
        while sum(found) < n:
            under = [
                want - f if share else -math.inf
                for f, want, share in zip(found, wanted, self.shares, strict=True)
            ]
            found[_extreme(under)] += 1
        if owed is not None:
            for rank, share in enumerate(self.shares):
                owed[rank] += size * (share - found[rank] / n)
        return tuple(found)

    def count(self, n_bytes: Sequence[float]) -> None:
        """Do nothing: bytes follow from units."""


class Reference:
    """The distribution of ik_llama.cpp: shares are corrected by the bytes that a rank holds
    already, by a factor of 2, so that the first layers over-correct.
    """

    def __init__(self, shares: Sequence[float]):
        self.shares, self._held = tuple(shares), [0.0] * len(shares)

    def units(self, n: int, key: str, size: float = 1.0) -> tuple[int, ...]:
        """Return how many of n units each rank gets."""
        total = 1 + sum(self._held)
        wanted = [
            n * (2 * share - held / total)
            for share, held in zip(self.shares, self._held, strict=True)
        ]
        found = [max(0, _rounded(want)) for want in wanted]
        while sum(found) > n:
            over = [f - w if f else -math.inf for f, w in zip(found, wanted, strict=True)]
            found[_extreme(over)] -= 1
        while sum(found) < n:
            found[_extreme([w - f for f, w in zip(found, wanted, strict=True)])] += 1
        return tuple(found)

    def count(self, n_bytes: Sequence[float]) -> None:
        """Remember the bytes of a tensor."""
        for rank, size in enumerate(n_bytes):
            self._held[rank] += size


def normalized(shares: Sequence[float]) -> tuple[float, ...]:
    """Return shares that add up to 1. UsageError unless there are at least two and all are numbers
    of 0 or more, not all 0.
    """
    if len(shares) < 2:
        raise UsageError(f"-ts has {len(shares)} share, expected one for each of 2 or more ranks")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise UsageError(
            f"-ts {','.join(f'{share:g}' for share in shares)}: shares are 0 or more, and not all 0"
        )
    total = sum(shares)
    return tuple(share / total for share in shares)


def ranges(counts: Sequence[int], unit: int, end: int | None = None) -> list[tuple[int, int]]:
    """Return the ranges of `counts` units one after the other; (0, 0) for none. end: of the last
    range, if units do not divide it.
    """
    found, start = [], 0
    for count in counts:
        stop = start + count * unit
        found.append((start, stop) if count else (0, 0))
        start = stop
    if end is not None and end != start:
        last = max(rank for rank, count in enumerate(counts) if count)
        found[last] = found[last][0], end
    return found


def _rounded(x: float) -> int:
    """Round half away from zero."""
    return math.floor(x + 0.5) if x >= 0 else math.ceil(x - 0.5)


def _extreme(errors: Sequence[float]) -> int:
    """Return the first rank with the largest error; equal ones differ by rounding at most."""
    most = max(errors)
    return next(rank for rank, error in enumerate(errors) if error >= most - 1e-9)

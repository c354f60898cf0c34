"""Estimate the time left of a run. Elements of one type may take a hundred times as long as those
of another.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..plan.plan import PlannedTensor

TypePair = tuple[str, str]  # type before and after


class TimeLeft:
    """Track the seconds per element of every pair of types, and the elements of each pair that are
    left.

    finished: the number of tensors of the plan that an earlier run has written. clock: returns
    seconds.
    """

    def __init__(
        self,
        planned: Sequence[PlannedTensor],
        finished: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._last = clock, clock()
        self._seconds: dict[TypePair, float] = defaultdict(float)
        self._done: dict[TypePair, int] = defaultdict(int)
        self._left: dict[TypePair, int] = defaultdict(int)
        self._tensors = [
            ((plan.source.type.name, plan.target.type.name), plan.source.n_elements)
            for plan in planned[finished:]
            if plan.source.n_elements
        ]
        for pair, n_elements in self._tensors:
            self._left[pair] += n_elements
        self._tensors.reverse()
        self._in_tensor = 0

    def advance(self, n_elements: int) -> None:
        """Count the next elements, of the plan's tensors in order, as done."""
        now = self._clock()
        if not self._tensors:
            return
        pair, size = self._tensors[-1]
        self._seconds[pair] += now - self._last
        self._done[pair] += n_elements
        self._left[pair] -= n_elements
        self._last, self._in_tensor = now, self._in_tensor + n_elements
        if self._in_tensor >= size:
            self._tensors.pop()
            self._in_tensor = 0

    def seconds_left(self) -> float | None:
        """Return None before anything is done. A pair of types without a measurement counts as the
        mean of the others that change the type, or as nothing if it keeps the type.
        """
        changed = [pair for pair in self._done if pair[0] != pair[1]]
        if not changed:
            return None
        mean = sum(self._seconds[pair] for pair in changed) / sum(
            self._done[pair] for pair in changed
        )
        return sum(n_elements * self._cost(pair, mean) for pair, n_elements in self._left.items())

    def _cost(self, pair: TypePair, mean: float) -> float:
        if pair in self._done:
            return self._seconds[pair] / self._done[pair]
        return mean if pair[0] != pair[1] else 0.0

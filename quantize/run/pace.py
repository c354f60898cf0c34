"""The time that is left of a run: elements of one type may take a hundred times as long as those of
another.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from ..plan.plan import PlannedTensor

Kind = tuple[str, str]  # types before and after


class Pace:
    """What elements of every pair of types took so far, and the elements of each that are still to
    come.

    finished: so many tensors of the plan are there already. clock: seconds.
    """

    def __init__(
        self,
        planned: Sequence[PlannedTensor],
        finished: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._last = clock, clock()
        self._seconds: dict[Kind, float] = defaultdict(float)
        self._done: dict[Kind, int] = defaultdict(int)
        self._left: dict[Kind, int] = defaultdict(int)
        self._tensors = [
            ((plan.source.type.name, plan.target.type.name), plan.source.n_elements)
            for plan in planned[finished:]
            if plan.source.n_elements
        ]
        for kind, n_elements in self._tensors:
            self._left[kind] += n_elements
        self._tensors.reverse()
        self._in_tensor = 0

    def advance(self, n_elements: int) -> None:
        """The next elements, of the plan's tensors in order, are done."""
        now = self._clock()
        if not self._tensors:
            return
        kind, size = self._tensors[-1]
        self._seconds[kind] += now - self._last
        self._done[kind] += n_elements
        self._left[kind] -= n_elements
        self._last, self._in_tensor = now, self._in_tensor + n_elements
        if self._in_tensor >= size:
            self._tensors.pop()
            self._in_tensor = 0

    def seconds_left(self) -> float | None:
        """None before anything is done. A pair of types that was not met yet counts as the mean of
        the others that change the type; one that keeps it as nothing.
        """
        changed = [kind for kind in self._done if kind[0] != kind[1]]
        if not changed:
            return None
        mean = sum(self._seconds[kind] for kind in changed) / sum(
            self._done[kind] for kind in changed
        )
        return sum(n_elements * self._cost(kind, mean) for kind, n_elements in self._left.items())

    def _cost(self, kind: Kind, mean: float) -> float:
        if kind in self._done:
            return self._seconds[kind] / self._done[kind]
        return mean if kind[0] != kind[1] else 0.0

"""What the first of several ranks decides while all of them work, such as to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_INTERVAL = 0.05  # seconds between two questions, about
_MOST_CALLS = 64


class Decision:
    """Calls return, on all ranks, whether `wanted` of the first rank has returned True. All ranks
    call it as often, and what is True stays so.

    share: returns the integers of the first rank on every rank. As that takes time, calls that
    follow each other quickly share one answer; the first rank says how many do.
    """

    def __init__(self, share: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[], bool]):
        self._share, self._wanted = share, wanted
        self._stop, self._calls, self._left, self._asked = False, 1, 0, time.perf_counter()

    def __call__(self) -> bool:
        if self._stop:
            return True
        if self._left:
            self._left -= 1
            return False
        now = time.perf_counter()
        seconds, self._asked = now - self._asked, now
        fit = int(_INTERVAL * self._calls / max(seconds, 1e-9))
        calls = max(1, min(2 * self._calls, _MOST_CALLS, fit))
        stop, self._calls = self._share(torch.tensor([int(self._wanted()), calls])).tolist()
        self._stop, self._left = bool(stop), self._calls - 1
        return self._stop

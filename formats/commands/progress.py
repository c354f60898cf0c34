"""Progress and estimates of commands. Imports nothing heavy."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

AFTER_SECONDS, EVERY_SECONDS = 5.0, 60.0


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Estimate:
    """Print on stderr what runs and when it will end: once after 5 seconds, then every minute.

    Work that ends sooner prints nothing. `clock` is for tests.
    """

    def __init__(
        self,
        what: str,
        *,
        every: float = EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.what, self.every, self.clock = what, every, clock
        self.started = clock()
        self.next = self.started + AFTER_SECONDS

    def due(self) -> bool:
        return self.clock() >= self.next

    def say(self, done: float) -> None:
        """Print a line, if it is time for one. done: the part of the work that is done, 0 to 1."""
        now = self.clock()
        if now < self.next:
            return
        self.next = now + self.every
        spent = now - self.started
        left = f", about {duration(spent / done - spent)} left" if done > 0 else ""
        share = f"{100 * done:.0f} %" if done >= 0.1 or not done else f"{100 * done:.1f} %"
        print(f"{self.what}: {share} in {duration(spent)}{left}", file=sys.stderr)


class ByteProgress:
    """Show progress in bytes: a bar on stderr if that is a terminal, else lines of `Estimate`.

    It is called with the number of bytes done since the last call, and is a context manager.
    `begin` sets how many bytes there will be. hidden: show nothing, as stdout goes to the same
    terminal and shows enough.
    """

    def __init__(self, what: str, *, hidden: bool = False):
        self.what, self.hidden = what, hidden
        self._bar: tqdm | None = None
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        self._total, self._estimate = total, Estimate(self.what)
        if sys.stderr.isatty() and not self.hidden:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, leave=False, desc=self.what)

    def __call__(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._bar is not None:
            self._bar.update(n_bytes)
        elif not sys.stderr.isatty():
            self._estimate.say(self._done / max(self._total, 1))

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

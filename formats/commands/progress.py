"""How commands say what they do and how long it will take. Imports nothing heavy."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_SECONDS, EVERY_SECONDS = 5.0, 60.0


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Estimate:
    """Says on stderr what runs and when it will end: once after 5 seconds, then every minute.

    Works that end earlier say nothing. `clock` is for tests.
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
        """Print a line, if it is time for one; done: the part of the work that is done, 0 to 1."""
        now = self.clock()
        if now < self.next:
            return
        self.next = now + self.every
        spent = now - self.started
        left = f", about {duration(spent / done - spent)} left" if done > 0 else ""
        share = f"{100 * done:.0f} %" if done >= 0.1 or not done else f"{100 * done:.1f} %"
        print(f"{self.what}: {share} in {duration(spent)}{left}", file=sys.stderr)


@contextmanager
def byte_progress(
    what: str, total: int, *, hidden: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with bytes as they are done: a bar on stderr where that is a
    terminal, else lines of `Estimate`. hidden: stdout goes to the same terminal and shows enough.
    """
    from tqdm import tqdm

    estimate, done, terminal = Estimate(what), 0, sys.stderr.isatty()
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        leave=False,
        desc=what,
        disable=hidden or not terminal,
    ) as bar:

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            bar.update(n_bytes)
            if not terminal:
                estimate.say(done / max(total, 1))

        yield advance

"""Progress and estimates of commands. Imports nothing heavy."""

from __future__ import annotations

import os
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


def count_of(n: int, what: str) -> str:
    """Return "1 chunk" or "2 chunks"."""
    return f"{n} {what}{'s' * (n != 1)}"


def on_one_line() -> bool:
    """Return whether stdout and stderr are the same terminal, file or pipe, so that a message would
    continue a line of results.
    """
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError):  # closed, or replaced
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


_line_is_open = False


def print_result(text: str) -> None:
    """Print text on stdout that need not end its line, and remember whether it did."""
    global _line_is_open
    print(text, end="", flush=True)
    _line_is_open = not text.endswith("\n") if text else _line_is_open


def line_break() -> str:
    """Return what has to precede a message on stderr: a line break if the message would continue a
    line of `print_result`, otherwise nothing.
    """
    global _line_is_open
    is_open, _line_is_open = _line_is_open, False
    return "\n" if is_open and on_one_line() else ""


class Estimate:
    """Print on stderr what runs and when it will end: once after 5 seconds, then every minute.

    Work that ends sooner prints nothing. before: what precedes each line, such as a line break
    where stdout is in the middle of a line. `clock` is for tests.
    """

    def __init__(
        self,
        what: str,
        *,
        every: float = EVERY_SECONDS,
        before: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.what, self.every, self.before, self.clock = what, every, before, clock
        self.restart()

    def restart(self) -> None:
        """Count time from now on."""
        self.started = self.clock()
        self.next = self.started + AFTER_SECONDS

    def due(self) -> bool:
        """Return whether it is time for the next line."""
        return self.clock() >= self.next

    def say(self, done: float) -> None:
        """Print a line, if it is time for one. done: the part of the work that is done, 0 to 1."""
        now = self.clock()
        if now < self.next:
            return
        self.next = now + self.every
        print(
            f"{self.before}{self.what}: {share_and_time(done, now - self.started)}", file=sys.stderr
        )


def share_and_time(done: float, spent: float, left: float | None = None) -> str:
    """Return "30 % in 31 s, about 1.2 min left". done: 0 to 1. left: seconds, by default as if the
    rest were as fast.
    """
    share = f"{100 * done:.0f} %" if done >= 0.1 or not done else f"{100 * done:.1f} %"
    if left is None and done > 0:
        left = spent / done - spent
    return f"{share} in {duration(spent)}" + (
        "" if left is None else f", about {duration(left)} left"
    )


class Meter:
    """Show how far some work is: a bar on stderr if that is a terminal, else lines of `Estimate`.

    It is called with how much was done since the last call, and is a context manager. `begin` sets
    how much there will be, in `unit`. hidden: show nothing, as stdout goes to the same terminal and
    shows enough.
    """

    def __init__(self, what: str, *, unit: str = "B", hidden: bool = False):
        self.what, self.unit, self.hidden = what, unit, hidden
        self._bar: tqdm | None = None
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        """Set the total, in units of the meter, and show a bar if stderr is a terminal."""
        from tqdm import tqdm

        self._total, self._estimate = total, Estimate(self.what)
        if sys.stderr.isatty() and not self.hidden:
            self._bar = tqdm(
                total=total,
                unit=self.unit,
                unit_scale=True,
                leave=False,
                dynamic_ncols=True,
                desc=self.what,
            )

    def __call__(self, n: int) -> None:
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif not sys.stderr.isatty():
            self._estimate.say(self._done / max(self._total, 1))

    def reach(self, done: int, total: int) -> None:
        """Say how much is done of how much, in all."""
        if not self._total:
            self.begin(total)
        self(done - self._done)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Show progress on the terminal: bars on stderr, lines on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from ...errors import printable
from ...formats.commands.progress import (
    AFTER_SECONDS,
    EVERY_SECONDS,
    Estimate,
    duration,
    share_and_time,
)
from ...formats.tensor_names import TensorName
from ..plan.plan import PlannedTensor
from ..rounding.choice import RoleChoice
from ..rounding.late import LayerChoices
from ..run.compile_task import CompileProgress, CompileTask
from ..run.report import Checked, RunProgress, TensorReport
from .eta import TimeLeft
from .printing import checked_line, tensor_line

# tqdm's own estimate would treat all types as equally fast.
_RUN_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"
_COMPILE_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_MOST_NAMED = 8


# Kinds of tasks in the order in which they name a line: for one type, and for several.
_KINDS = {
    "search": ("search for", "searches for"),
    "round": ("rounding to", "roundings to"),
    "decode": ("decoder of", "decoders of"),
}


def compile_line(tasks: Sequence[CompileTask], seconds: float) -> str:
    """Return a line that says what is compiled, and about how long that takes."""
    by_kind = {
        kind: list(dict.fromkeys(task.type for task in tasks if task.kind == kind))
        for kind in _KINDS
    }
    kind, names = next((kind, names) for kind, names in by_kind.items() if names)
    one, several = _KINDS[kind]
    what = f"the {one}" if len(names) == 1 else f"the {len(names)} {several}"
    named = ", ".join(names[:_MOST_NAMED]) + (", .." if len(names) > _MOST_NAMED else "")
    return f"compiling {what} {named} (once, about {duration(seconds)})"


class CompileBar(CompileProgress):
    """Print what is compiled on stderr, with a bar. `compile_seconds`: how long that took."""

    def __init__(self) -> None:
        self.compile_seconds = 0.0
        self._compile_started = 0.0
        self._compile_bar: tqdm | None = None

    def compiling(self, tasks: Sequence[CompileTask], seconds: float) -> None:
        self._compile_started = time.monotonic()
        print(compile_line(tasks, seconds), file=sys.stderr, flush=True)
        self._compile_bar = tqdm(
            total=len(tasks),
            leave=False,
            disable=None,
            dynamic_ncols=True,
            desc="compiling",
            bar_format=_COMPILE_BAR,
        )

    def compile_waiting(self) -> None:
        if self._compile_bar is not None:
            self._compile_bar.refresh()

    def compiled(self, task: CompileTask) -> None:
        """Move the bar by one and show the task's type."""
        if self._compile_bar is not None:
            self._compile_bar.set_postfix_str(task.type, refresh=False)
            self._compile_bar.update(1)

    def compile_end(self) -> None:
        """Remove the bar and add to `compile_seconds`."""
        self.compile_seconds += time.monotonic() - self._compile_started
        if self._compile_bar is not None:
            self._compile_bar.close()
            self._compile_bar = None


class RunPrinter(CompileBar, RunProgress):
    """Show a bar with the time left on stderr, or print a line now and then if that is not a
    terminal. With `verbose`, also print a line per tensor on stdout.
    """

    def __init__(
        self,
        *,
        dry_run: bool = False,
        verbose: bool = False,
        line: Callable[[int, int, TensorReport], str] = tensor_line,
        label: str = "",
        what: str = "quantizing",
    ):
        """line: makes a tensor's line from its index, the number of tensors and its report; label:
        precedes each line; what: what the run does.
        """
        super().__init__()
        self.dry_run, self.verbose, self.line = dry_run, verbose, line
        self.bar: tqdm | None = None
        self.planned: Sequence[PlannedTensor] = ()
        self.time_left = TimeLeft([])
        self.label = f"{printable(label)}: " if label else ""
        self.what = f"{what} {printable(label)}" if label else what
        self._choosing = Estimate("choosing how each role is rounded")
        self._done, self._started = 0, time.monotonic()
        self._next = self._started + AFTER_SECONDS

    def choosing(self, done: int, count: int) -> None:
        if done == 0:
            self._choosing = Estimate("choosing how each role is rounded")
        self._choosing.say(done / max(count, 1))

    def rounding_chosen(self, choices: Sequence[RoleChoice]) -> None:
        for choice in choices:
            print(self.label + choice.line(), flush=True)

    def layers_rounded(self, choices: Sequence[LayerChoices]) -> None:
        for choice in choices:
            print(self.label + choice.line(), flush=True)

    def begin(self, planned: Sequence[PlannedTensor]) -> None:
        """Start the clock and, unless it is a dry run, a bar of the plan's elements."""
        self.planned, self.time_left = planned, TimeLeft(planned)
        self._started = time.monotonic()
        self._next = self._started + AFTER_SECONDS
        if not self.dry_run:
            self.bar = tqdm(
                total=sum(p.source.n_elements for p in planned),
                unit="el",
                unit_scale=True,
                leave=False,
                disable=None,
                dynamic_ncols=True,
                desc=self.label.rstrip(": ") or None,
                bar_format=_RUN_BAR,
            )

    def resume(self, finished: Sequence[TensorReport]) -> None:
        self.time_left = TimeLeft(self.planned, len(finished))
        self._done = sum(report.planned.source.n_elements for report in finished)
        if self.bar is not None:
            self.bar.initial = self.bar.n = self._done

    def advance(self, n_elements: int) -> None:
        """Move the bar by `n_elements` elements and estimate the time left; without a terminal,
        print a line now and then.
        """
        self.time_left.advance(n_elements)
        self._done += n_elements
        if self.bar is None:
            return
        if self.bar.disable:
            self._say_now_and_then()
            return
        left = self.time_left.seconds_left()
        self.bar.set_postfix_str("" if left is None else f"{duration(left)} left", refresh=False)
        self.bar.update(n_elements)

    def _say_now_and_then(self) -> None:
        now, left = time.monotonic(), self.time_left.seconds_left()
        if now < self._next or left is None:
            return
        self._next = now + EVERY_SECONDS
        share = self._done / max(1, sum(p.source.n_elements for p in self.planned))
        line = share_and_time(share, now - self._started, left)
        print(f"{self.what}: {line}", file=sys.stderr, flush=True)

    def tensor_done(self, index: int, report: TensorReport) -> None:
        """Print the line of tensor `index` if verbose, else show the next tensor's layer and role
        on the bar.
        """
        if self.verbose:
            line = self.line(index, len(self.planned), report)
            tqdm.write(self.label + line, file=sys.stdout)
        elif self.bar is not None and not self.bar.disable and index + 1 < len(self.planned):
            # set here and not at the first piece of the next tensor, which may take long
            following = TensorName.parse(self.planned[index + 1].source.name)
            where = "" if following.layer is None else f"layer {following.layer} "
            self.bar.set_description_str(
                f"{self.label}{printable(where + following.role, 40)}", refresh=False
            )

    def validated(self, index: int, checked: Checked) -> None:
        if checked.fault:
            print(self.label + checked_line(index, len(self.planned), checked), flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()

"""Reports of a run: by tensor, in total, and its progress."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor
from .compile_task import CompileProgress
from .workload import RunEstimate

if TYPE_CHECKING:
    from ..rounding.choice import RoleChoice
    from ..rounding.late import LayerChoices


@dataclass
class TensorReport:
    """The result for one tensor. Errors are relative to the root mean square of the source, and
    None if bytes were kept or nothing was measured.
    """

    planned: PlannedTensor
    rmse: float | None = None
    weighted_rmse: float | None = None
    weighted: bool = False  # whether importances were used
    largest_error: float = 0.0
    zeroed: int = 0  # NaN and infinities of the source that were set to 0


@dataclass(frozen=True)
class Checked:
    """A tensor that was read back.

    report: its errors against the source, None if nothing was compared. fault: what is wrong, or
    "".
    """

    tensor: TensorInfo
    report: TensorReport | None = None
    fault: str = ""


@dataclass(repr=False)
class RunReport:
    """The tensors of one output of a run. Sizes are bytes of tensor data. estimate: the estimate of
    a dry run. files: paths of what is written, several for shards; reports of equal
    contents are equal.
    """

    tensors: list[TensorReport] = field(default_factory=list)
    estimate: RunEstimate | None = None
    files: tuple[str, ...] = field(default=(), compare=False)

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(t.planned.source.n_bytes for t in self.tensors)

    @property
    def target_bytes(self) -> int:
        """Bytes of all tensors in the output."""
        return sum(t.planned.target.n_bytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the output's tensors."""
        return (
            8 * self.target_bytes / max(1, sum(t.planned.target.n_elements for t in self.tensors))
        )

    @property
    def replaced(self) -> int:
        """The number of tensors that got a fallback, as the requested type does not fit them."""
        return sum(1 for t in self.tensors if t.planned.fallback)

    def __repr__(self) -> str:
        """Return one line, as `RunReport(291 tensors, 14.96 GiB -> 4.25 GiB, 4.55 bits per
        weight)`.
        """
        said = [
            f"{len(self.tensors)} tensors",
            f"{_size(self.source_bytes)} -> {_size(self.target_bytes)}",
            f"{self.bits_per_weight:.2f} bits per weight",
        ]
        if self.replaced:
            said.append(f"{self.replaced} fallbacks")
        if zeroed := sum(t.zeroed for t in self.tensors):
            said.append(f"{zeroed} values set to 0")
        if self.estimate is not None:
            said.append(f"dry run, estimated {self.estimate.seconds:.1f} s")
        return f"RunReport({', '.join(said)})"


def _size(n_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes} bytes"


class RunProgress(CompileProgress):
    """Callbacks for one output of a run. This base class ignores them all."""

    def begin(self, planned: Sequence[PlannedTensor]) -> None:
        """Called once with the plan, before the first tensor."""

    def choosing(self, done: int, count: int) -> None:
        """Called before `begin` while the rounding of `count` roles is chosen."""

    def rounding_chosen(self, choices: Sequence[RoleChoice]) -> None:
        """Called before `begin` with how each role is rounded with second moments."""

    def layers_rounded(self, choices: Sequence[LayerChoices]) -> None:
        """Called after `end` with how each role was rounded with moments of its own layers."""

    def resume(self, finished: Sequence[TensorReport]) -> None:
        """Called after `begin` if an earlier run has written the first tensors of the plan."""

    def advance(self, n_elements: int) -> None:
        """Called when `n_elements` more elements are written."""

    def tensor_done(self, index: int, report: TensorReport) -> None:
        """Called when tensor `index` of the plan is written, with its errors."""

    def end(self, report: RunReport) -> None:
        """Called when the output is complete."""

    def validated(self, index: int, checked: Checked) -> None:
        """Called after `end` for every tensor that was read back, see `validate`."""


def report_plan(planned: Sequence[PlannedTensor], progress: RunProgress | None) -> RunReport:
    """Return the report of a run of which only the plan was made."""
    report = RunReport([TensorReport(plan) for plan in planned])
    progress = progress or RunProgress()
    progress.begin(planned)
    for index, tensor in enumerate(report.tensors):
        progress.tensor_done(index, tensor)
    progress.end(report)
    return report


class ErrorTotals:
    """Add up the measurements of a tensor's pieces in order."""

    def __init__(self) -> None:
        self.totals, self.largest, self.any = np.zeros(4), 0.0, False
        self.zeroed = 0

    def add(self, measured: np.ndarray | None) -> None:
        """Add the sums of a `PieceResult`."""
        if measured is not None:
            self.totals += measured[:4]
            self.largest, self.any = max(self.largest, float(measured[4])), True
            self.zeroed += int(measured[5:].sum())

    def report(self, planned: PlannedTensor, weighted: bool) -> TensorReport:
        """Return the errors of a tensor: relative errors sqrt(sum e^2 / sum x^2), one of them
        weighted by importances.
        """
        if not self.any:
            return TensorReport(planned)
        e2, x2, we2, wx2 = self.totals
        return TensorReport(
            planned,
            float(np.sqrt(e2 / x2)) if x2 != 0 else 0.0,
            float(np.sqrt(we2 / wx2)) if wx2 != 0 else 0.0,
            weighted,
            self.largest,
            self.zeroed,
        )


class PhaseClock:
    """Measure the seconds that a thread spends in each phase of its work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def spent(self, phase: str) -> None:
        """Add the seconds since the last call to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {spent:.2f}" for phase, spent in self.seconds.items())

"""What a run says: of every tensor, in total, and while it goes on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor
from ..run.kinds import Estimate


@dataclass
class TensorReport:
    """What became of one tensor. Errors are relative to the root mean square of the source, None
    where bytes were kept or nothing was measured.
    """

    planned: PlannedTensor
    rmse: float | None = None
    weighted_rmse: float | None = None
    weighted: bool = False  # whether importances were used
    largest_error: float = 0.0
    zeroed: int = 0  # NaN and infinities of the source that were set to 0


@dataclass(frozen=True)
class Checked:
    """A tensor that was read back. report: its errors against the source, None where nothing was
    compared. fault: what is wrong, "" if nothing is.
    """

    tensor: TensorInfo
    report: TensorReport | None = None
    fault: str = ""


@dataclass
class RunReport:
    """Totals of one output of a run; sizes are bytes of tensor data. estimate: of a whole run of
    which only the plan was made.
    """

    tensors: list[TensorReport] = field(default_factory=list)
    estimate: Estimate | None = None

    @property
    def source_bytes(self) -> int:
        return sum(t.planned.source.n_bytes for t in self.tensors)

    @property
    def target_bytes(self) -> int:
        return sum(t.planned.target.n_bytes for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return (
            8 * self.target_bytes / max(1, sum(t.planned.target.n_elements for t in self.tensors))
        )

    @property
    def replaced(self) -> int:
        """Tensors whose rows or row counts the type asked for cannot have."""
        return sum(1 for t in self.tensors if t.planned.fallback)


class Progress:
    """What a caller may want to hear of one output of a run; this one stays silent."""

    def begin(self, planned: Sequence[PlannedTensor]) -> None: ...

    def resume(self, finished: Sequence[TensorReport]) -> None:
        """The first tensors of the plan are there already, from an earlier run; called after
        `begin`, if it is so.
        """

    def advance(self, n_elements: int) -> None: ...

    def tensor_done(self, index: int, report: TensorReport) -> None: ...

    def end(self, report: RunReport) -> None: ...

    def validated(self, index: int, checked: Checked) -> None:
        """A tensor was read back, see `validate`; after `end`, if that is asked for."""


class Sums:
    """Adds up the measurements of a tensor's pieces in order."""

    def __init__(self) -> None:
        self.totals, self.largest, self.any = np.zeros(4), 0.0, False
        self.zeroed = 0

    def add(self, measured: np.ndarray | None) -> None:
        """measured: float64[6] as `piece.work` gives it."""
        if measured is not None:
            self.totals += measured[:4]
            self.largest, self.any = max(self.largest, float(measured[4])), True
            self.zeroed += int(measured[5:].sum())

    def report(self, planned: PlannedTensor, weighted: bool) -> TensorReport:
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


class Clock:
    """Where the run's own thread spends its time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def spent(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{phase} {spent:.2f}" for phase, spent in self.seconds.items())

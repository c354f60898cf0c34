"""The measured cost of a run's pieces, and the estimate made from it. See `estimate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...formats.disk import DiskNeed
from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor


@dataclass
class Workload:
    """Tensors of a source whose pieces cost the same per element.

    planned: the number of each output and the plan that it has for the first tensor. piece:
    elements of the largest piece. first: extra seconds that the first piece took. spent, tried:
    seconds of the trials and their elements, over all threads or devices together.
    """

    source: TensorInfo
    planned: tuple[tuple[int, PlannedTensor], ...]
    weighted: bool
    piece: int
    on_device: bool = False
    tensors: list[TensorInfo] = field(default_factory=list)
    first: float = 0.0
    spent: float = 0.0
    tried: int = 0

    @property
    def n_elements(self) -> int:
        """Elements of all tensors."""
        return sum(info.n_elements for info in self.tensors)

    @property
    def kept(self) -> bool:
        """Whether every output copies the bytes."""
        return all(plan.kept for _, plan in self.planned)

    @property
    def group(self) -> int:
        """The number of rows that pieces are a multiple of."""
        return (
            math.lcm(*(plan.target.type.group_rows for _, plan in self.planned))
            * self.source.type.group_rows
        )

    @property
    def seconds(self) -> float:
        """The estimated seconds for all tensors."""
        return self.spent / max(1, self.tried) * self.n_elements


@dataclass(frozen=True)
class RunEstimate:
    """Time, memory and disk space of a run that has not started.

    seconds: the whole run: `setup` before the first piece, `loading` compiled code once per
    process, `working`, and `finishing` until the disk has everything. peak_bytes: resident memory,
    at least what the process has used already. compiling: seconds spent now on searches that this
    machine had not compiled yet. disk_bound: the disk is slower than the work. disks: the space
    that the outputs take.
    """

    seconds: float
    peak_bytes: int
    setup: float
    loading: float
    working: float
    finishing: float
    compiling: float
    disk_bound: bool
    disks: list[DiskNeed]
    workloads: list[Workload]

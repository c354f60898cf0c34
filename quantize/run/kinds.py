"""What is found out of a run before it begins: what pieces of its tensors cost, and what that makes
in all. See `estimate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...formats.output import DiskNeed
from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor


@dataclass
class Kind:
    """Tensors of a source whose pieces cost the same. targets: their types in the outputs; piece:
    elements of the largest piece.

    first: seconds that its first piece took more than another. spent, tried: seconds of the trials
    and the elements of them, all threads or devices together.
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
        return sum(info.n_elements for info in self.tensors)

    @property
    def kept(self) -> bool:
        return all(plan.kept for _, plan in self.planned)

    @property
    def group(self) -> int:
        """Rows that pieces are a multiple of."""
        return (
            math.lcm(*(plan.target.type.group_rows for _, plan in self.planned))
            * self.source.type.group_rows
        )

    @property
    def seconds(self) -> float:
        """Of the whole kind."""
        return self.spent / max(1, self.tried) * self.n_elements


@dataclass(frozen=True)
class Estimate:
    """Of a run that is still to come. seconds: its whole time: `setup` before the first piece,
    `loading` compiled code once per process, `working`, and `finishing` until the disk has
    everything. peak_bytes: resident memory, and at least what the process had already. compiling:
    seconds that were spent now on searches that this machine had not compiled yet. disk_bound: the
    disk is slower than the rest. disks: the space that the outputs take.
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
    kinds: list[Kind]

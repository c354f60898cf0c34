"""Branches of a prompt on the reference path."""

from __future__ import annotations

from ...layers.batch import Batch
from ..common.executor import Executor
from ..common.registry import PlacedBranch
from .stream import Stream


class SlowBranch(Executor):
    """A branch on the reference path, on the device of its block."""

    def __init__(self, branch: PlacedBranch):
        self.branch = branch

    def __call__(self, stream: Stream, batch: Batch) -> None:
        h, branch, device = stream.settled(), self.branch, self.branch.device
        h += branch.branch(h.to(device), batch.at(branch.layer, device)).to(h.device)

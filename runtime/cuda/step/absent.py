"""Executors of layers of which a tensor-parallel rank computes nothing: it only takes part in the
sums.
"""

from __future__ import annotations

import torch

from ...layers.absent import AbsentMixer, AbsentRows
from ..common.context import Context
from ..common.executor import Executor
from ..common.registry import STEP, PlacedBranch, executor
from .frame import Frame


@executor(STEP, AbsentMixer)
@executor(STEP, AbsentRows)
class StepAbsent(Executor):
    """Adds nothing."""

    captured = repeatable = True
    joins = False

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch = branch

    def check(self, state) -> None:
        """Takes any."""

    def __call__(self, frame: Frame, h: torch.Tensor, state) -> None:
        """Leave this rank's part of the sum 0."""

"""Executors of layers of which a tensor-parallel rank computes nothing: it only takes part in the
sums.
"""

from __future__ import annotations

import torch

from ..layers.absent import AbsentMixer, AbsentRows
from ..layers.batch import Batch
from .context import Context
from .executor import Executor
from .prompt_stream import Stream
from .registry import PROMPT, STEP, PlacedBranch, executor
from .step_frame import Frame


@executor(PROMPT, AbsentMixer)
@executor(PROMPT, AbsentRows)
class PromptAbsent(Executor):
    """Adds nothing."""

    def __init__(self, branch: PlacedBranch, context: Context):
        self.branch = branch

    def __call__(self, stream: Stream, batch: Batch) -> None:
        stream.settled()  # no norm here adds what the branch before has left
        if stream.narrows:
            stream.keep_last(batch.n_sequences)


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

"""Executors of layers of which a tensor-parallel rank computes nothing: it only takes part in the
sums.
"""

from __future__ import annotations

from ...layers.absent import AbsentMixer, AbsentRows
from ...layers.batch import Batch
from ..common.context import Context
from ..common.executor import Executor
from ..common.registry import PROMPT, PlacedBranch, executor
from .common.stream import Stream


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

"""CUDA graphs for what is the same in all passes of as many rows, whatever their positions and the
tokens before them.

Between the attention of one layer and the next there are a dozen kernels and products. Their
launches are the same in every pass of as many rows, as they only use buffers of the context, and
the host takes longer to launch them one by one than a fast device takes to run them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ...layers.batch import Batch
from ...weights.ranges import ranged
from ..common.context import Context
from ..common.executor import Executor
from .stream import Stream

Stage = Callable[[Stream, Batch], None]
MOST_ROW_COUNTS = 2  # with graphs: that of the full passes of a prompt, and one more
RECENT = 8  # row counts without graphs that are remembered
_FREED_TOGETHER = 4  # row counts: torch keeps the memory of dropped graphs until then


class Staged(Executor, ABC):
    """An executor made of `stages`, each of which is the same for all passes of as many rows or
    not.

    The property is read every time: an executor that kept its bound methods would keep itself
    alive, and the weights of a closed model.
    """

    @property
    @abstractmethod
    def stages(self) -> Sequence[tuple[bool, Stage]]:
        """(whether it is the same in every pass of as many rows, what to call), in order."""

    @ranged
    def __call__(self, stream: Stream, batch: Batch) -> None:
        """Run all stages for the rows of the stream."""
        for _, part in self.stages:
            part(stream, batch)


@dataclass(frozen=True)
class CapturedGraph:
    """A graph, what is pending in the stream after it, and the context's `growths` when it was
    captured: with other growths its buffers have changed.
    """

    graph: torch.cuda.CUDAGraph
    pending: dict
    growths: int


class PromptGraphs:
    """Graphs by number of rows. The size of full passes, of which a long prompt has many, is
    captured in the first pass, other sizes when they come again.
    """

    def __init__(self, context: Context):
        self.context = context
        self._kept: dict[int, PassGraphs] = {}  # by rows, the one used last at the end
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._dropped = 0  # row counts that had graphs
        self._stream: torch.cuda.Stream | None = (
            None  # one for all captures: cuBLAS keeps a workspace for every stream
        )

    def of(self, rows: int) -> PassGraphs | None:
        """Return the graphs for a pass of so many rows that begins now; None if nothing is
        captured.
        """
        if not can_capture(self.context.device):
            return None
        found = self._kept.pop(rows, None)
        if found is None:
            if rows in self._recent:
                self._recent.remove(rows)
            # Most sizes never come again: they must not replace others.
            elif rows != self.context.ubatch:
                self._recent.append(rows)
                return None
            self._free_before_capture()
            self._stream = self._stream or torch.cuda.Stream(self.context.device)
            found = PassGraphs(self.context, self._stream)
        self._kept[rows] = found
        found.begin()
        return found

    def _free_before_capture(self) -> None:
        """Free memory before captures. What a capture allocates is in the private memory of its
        graph, which torch frees only on request; it then frees all that it keeps, and waits for the
        device, so this is not done for every new size.
        """
        if len(self._kept) == MOST_ROW_COUNTS:
            self._dropped += self._kept.pop(next(iter(self._kept))).has_graphs
        if self._dropped >= _FREED_TOGETHER:
            self._dropped = 0
            torch.cuda.empty_cache()


class PassGraphs:
    """The graphs of one number of rows, in order: every pass has the same segments."""

    def __init__(self, context: Context, stream: torch.cuda.Stream):
        self.context, self._stream = context, stream
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, CapturedGraph] = {}
        self._next = 0

    @property
    def has_graphs(self) -> bool:
        return bool(self._captured)

    def begin(self) -> None:
        """A pass begins with the first segment."""
        self._next = 0

    def run(self, parts: Sequence[Stage], stream: Stream, batch: Batch) -> None:
        """Run the next segment, which consists of these parts. Without a graph they are launched
        first and then captured: by then buffers have their sizes and kernels are loaded.
        """
        number, before = self._next, stream.pending()
        self._next += 1
        held = self._captured.get(number)
        if held is not None and held.growths == self.context.growths:
            held.graph.replay()
            stream.left(held.pending)
            return
        for part in parts:
            part(stream, batch)
        stream.left(before)
        self._captured[number] = CapturedGraph(
            self._capture(parts, stream, batch), stream.pending(), self.context.growths
        )

    def _capture(
        self, parts: Sequence[Stage], stream: Stream, batch: Batch
    ) -> torch.cuda.CUDAGraph:
        """Capture without running. torch.cuda.graph would wait for the device and collect garbage,
        once per layer.
        """
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            # Other threads may continue.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for part in parts:
                    part(stream, batch)
            except BaseException:
                # The capture is void; the first error is the one to show.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._stream)
        return graph


def can_capture(device: torch.device) -> bool:
    """Return whether there are graphs on this device."""
    return device.type == "cuda"

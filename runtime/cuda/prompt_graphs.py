"""What of a pass depends neither on where its rows stand nor on what came before them, as CUDA
graphs for all passes of as many rows.

From one layer's attention to the next one's there are a dozen kernels and products. Their launches
are the same in every pass of a number of rows, as all that they touch lies in the context's
buffers, and the host takes longer to ask for them one by one than a fast device to run them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ..layers.batch import Batch
from .context import Context
from .prompt_stream import Stream

Part = Callable[[Stream, Batch], None]
MOST_ROW_COUNTS = 2  # of which graphs are kept: those of a prompt's full passes, and of one more
RECENT = (
    8  # row counts without graphs that are remembered: one that comes again later is as good as new
)
_FREED_TOGETHER = (
    4  # row counts' graphs: the memory of those that are gone stays reserved until then
)


class InParts(ABC):
    """An executor that names its `parts` in order: what to call, and whether that is the same for
    all passes of as many rows.

    They are asked for anew every time: an executor that kept its own methods would hold itself, and
    a closed model's weights with it.
    """

    @property
    @abstractmethod
    def parts(self) -> Sequence[tuple[bool, Part]]:
        """(whether it is the same in every pass of as many rows, what to call), in order."""

    def __call__(self, stream: Stream, batch: Batch) -> None:
        for _, part in self.parts:
            part(stream, batch)


@dataclass(frozen=True)
class Segment:
    """A graph, what is handed in to the stream behind it, and the context's `growths` by which to
    know that its buffers are gone.
    """

    graph: torch.cuda.CUDAGraph
    pending: dict
    growths: int


class PromptGraphs:
    """Full passes, of which a long prompt has many, are captured in the first one; those of other
    sizes when they come again.
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
        """For a pass of so many rows that begins now; None where nothing is captured."""
        if not can_capture(self.context.device):
            return None
        found = self._kept.pop(rows, None)
        if found is None:
            if rows in self._recent:
                self._recent.remove(rows)
            elif (
                rows != self.context.ubatch
            ):  # most sizes never come again: they take nobody's place
                self._recent.append(rows)
                return None
            self._make_room()
            self._stream = self._stream or torch.cuda.Stream(self.context.device)
            found = PassGraphs(self.context, self._stream)
        self._kept[rows] = found
        found.begin()
        return found

    def _make_room(self) -> None:
        """Before captures: what they allocate lies in memory of their graphs' own, which torch
        gives back only when told. It then gives back all that it keeps, and waits for the device:
        not for every new size.
        """
        if len(self._kept) == MOST_ROW_COUNTS:
            self._dropped += self._kept.pop(next(iter(self._kept))).has_graphs
        if self._dropped >= _FREED_TOGETHER:
            self._dropped = 0
            torch.cuda.empty_cache()


class PassGraphs:
    """The graphs of one number of rows, one behind the other: a pass consists of the same segments
    every time.
    """

    def __init__(self, context: Context, stream: torch.cuda.Stream):
        self.context, self._stream = context, stream
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Segment] = {}
        self._next = 0

    @property
    def has_graphs(self) -> bool:
        return bool(self._captured)

    def begin(self) -> None:
        """A pass begins with the first segment."""
        self._next = 0

    def run(self, parts: Sequence[Part], stream: Stream, batch: Batch) -> None:
        """The next segment, these parts. What has no graph runs as it comes, and then is captured:
        buffers have their sizes by then, and kernels are loaded.
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
        self._captured[number] = Segment(
            self._capture(parts, stream, batch), stream.pending(), self.context.growths
        )

    def _capture(self, parts: Sequence[Part], stream: Stream, batch: Batch) -> torch.cuda.CUDAGraph:
        """Nothing runs yet. torch.cuda.graph would wait for the device and collect garbage, once
        per layer.
        """
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(
                pool=self._pool, capture_error_mode="thread_local"
            )  # other threads may go on meanwhile
            try:
                for part in parts:
                    part(stream, batch)
            except BaseException:
                with suppress(
                    RuntimeError
                ):  # that the capture is void: what it failed of is to be seen
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._stream)
        return graph


def can_capture(device: torch.device) -> bool:
    """Whether there are graphs on this device."""
    return device.type == "cuda"

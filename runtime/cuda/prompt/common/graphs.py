"""CUDA graphs for what is the same in all passes of a kind, whatever their tokens.

Between the attention of one layer and the next there are a dozen kernels and products. Their
launches are the same in every pass of as many rows, as they only use buffers of the context, and
the host takes longer to launch them one by one than a fast device takes to run them. In passes that
begin at position 0 attention is the same, too, before its keys and values go into the cache. Rows
that are left at the end, and inputs of layers, are in buffers, where graphs find them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ....layers.batch import Batch
from ....layers.rope import Rope
from ....state.cache import CacheSettings
from ....weights.ranges import ranged
from ...common.context import Angles, Context
from ...common.executor import Executor
from .stream import Stream

Stage = Callable[[Stream, Batch], None]
Part = tuple[int, Stage]  # the layer, what to call
# Whether its parts are the same in every pass of a kind, and the parts.
Segment = tuple[bool, list[Part]]
MOST_KINDS = 3  # with graphs: the full passes of a prompt, the first of them, and one more
RECENT = 8  # kinds without graphs that are remembered
_FREED_TOGETHER = 4  # kinds: torch keeps the memory of dropped graphs until then


@dataclass(frozen=True)
class PassKind:
    """What passes with the same stages and graphs have in common.

    begins: all sequences begin at position 0. whole: of every table of the sequence that is kept,
    its window and whether its rows follow each other; None without a state. settings: of the cache.
    long: of rotations that depend on the context, whether they are those of long ones; empty where
    no graph rotates. last: only the last row of each sequence is wanted.
    """

    rows: int
    n_sequences: int
    begins: bool
    whole: tuple[tuple[int, bool], ...] | None
    settings: CacheSettings | None
    long: tuple[bool, ...]
    last: bool

    @classmethod
    def of(cls, batch: Batch, ropes: Sequence[Rope], last: bool) -> PassKind:
        """ropes: that depend on the context."""
        whole, settings = None, batch.settings
        if batch.states is not None:
            state = batch.states[0]
            tables = sorted(state.tables.items())
            whole = tuple((window, table.run is not None) for window, table in tables)
            settings = state.settings
        return cls(
            batch.n_sequences * batch.n_tokens,
            batch.n_sequences,
            batch.begins,
            whole,
            settings,
            tuple(rope.of_context(batch.contexts[0]) is not rope for rope in ropes)
            if batch.begins
            else (),
            last,
        )


def may_hold(context: Context, batch: Batch) -> bool:
    """Return whether graphs of this pass may hold what attention allocates: not for more rows than
    a pass of a prompt has, as windows of a text may.
    """
    return batch.n_sequences * batch.n_tokens <= context.ubatch


class Staged(Executor, ABC):
    """An executor made of `stages`, each of which is the same for all passes of a kind or not.

    It must not keep them itself: with its own bound methods it would keep itself alive, and the
    weights of a closed model.
    """

    @abstractmethod
    def stages(self, batch: Batch) -> Sequence[tuple[bool, Stage]]:
        """(whether it is the same in every pass of the kind of `batch`, what to call), in order.
        These depend only on the kind. What is the same reads the batch only for what the kind says,
        and for angles.
        """

    @ranged
    def __call__(self, stream: Stream, batch: Batch) -> None:
        """Run all stages for the rows of the stream."""
        for _, part in self.stages(batch):
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
    """Graphs by kind of pass. Full passes after others, of which a long prompt has many, are
    captured in the first one, other kinds when they come again.
    """

    def __init__(self, context: Context):
        self.context = context
        self._kept: dict[PassKind, PassGraphs] = {}  # the one used last at the end
        self._recent: deque[PassKind] = deque(maxlen=RECENT)
        self._dropped = 0  # kinds that had graphs
        self._stream: torch.cuda.Stream | None = (
            None  # one for all captures: cuBLAS keeps a workspace for every stream
        )

    def of(self, kind: PassKind) -> PassGraphs | None:
        """Return the graphs for a pass of this kind that begins now; None if it has none."""
        if not can_capture(self.context.device):
            return None
        found = self._kept.pop(kind, None)
        if found is None:
            if kind in self._recent:
                self._recent.remove(kind)
            # Most kinds never come again: they must not replace others.
            elif kind.rows != self.context.ubatch or kind.begins:
                self._recent.append(kind)
                return None
            self._free_before_capture()
            self._stream = self._stream or torch.cuda.Stream(self.context.device)
            found = PassGraphs(self.context, self._stream)
        self._kept[kind] = found
        found.begin()
        return found

    def _free_before_capture(self) -> None:
        """Free memory before captures. What a capture allocates is in the private memory of its
        graph, which torch frees only on request; it then frees all that it keeps, and waits for the
        device, so this is not done for every new kind.
        """
        if len(self._kept) == MOST_KINDS:
            self._dropped += self._kept.pop(next(iter(self._kept))).has_graphs
        if self._dropped >= _FREED_TOGETHER:
            self._dropped = 0
            torch.cuda.empty_cache()


class PassGraphs:
    """The graphs of one kind, in order: every pass has the same segments. `angles`: those of passes
    that begin at position 0, which graphs read where they are.
    """

    def __init__(self, context: Context, stream: torch.cuda.Stream):
        self.context, self._stream = context, stream
        self.angles: Angles = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, CapturedGraph] = {}
        self._next = 0

    @property
    def has_graphs(self) -> bool:
        """Whether any graph is captured."""
        return bool(self._captured)

    def begin(self) -> None:
        """A pass begins with the first segment."""
        self._next = 0

    def run(self, parts: Sequence[Part], stream: Stream, batch: Batch) -> None:
        """Run the next segment, which consists of these parts with their layers. Without a graph
        they are launched first and then captured: by then buffers have their sizes and kernels are
        loaded.
        """
        number, before = self._next, stream.pending()
        self._next += 1
        held = self._captured.get(number)
        if held is not None and held.growths == self.context.growths:
            held.graph.replay()
            stream.left(held.pending)
            return
        launch(parts, stream, batch)
        stream.left(before)
        self._captured[number] = CapturedGraph(
            self._capture(parts, stream, batch), stream.pending(), self.context.growths
        )

    def _capture(self, parts: Sequence[Part], stream: Stream, batch: Batch) -> torch.cuda.CUDAGraph:
        """Capture without running. torch.cuda.graph would wait for the device and collect garbage,
        once per layer.
        """
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            # Other threads may continue.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch(parts, stream, batch)
            except BaseException:
                # The capture is void; the first error is the one to show.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._stream)
        return graph


def launch(parts: Sequence[Part], stream: Stream, batch: Batch) -> None:
    """Call each part with the batch as its layer sees it."""
    for layer, part in parts:
        part(stream, batch.at(layer, stream.h.device))


def can_capture(device: torch.device) -> bool:
    """Return whether there are graphs on this device."""
    return device.type == "cuda"

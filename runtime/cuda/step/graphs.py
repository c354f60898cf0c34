"""The CUDA graphs of steps: captured when they are used for the second time, and replayed then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from ...cpu.offloaded_steps import OffloadedSteps
from .frame import StepSequence
from .offloaded import answered

MOST_GRAPHS = 16  # per sequence: a new one replaces the oldest
_FREED_TOGETHER = 16  # graphs: torch keeps the memory of dropped ones until then


class StepGraphs:
    """Captures and replays graphs, which sequences hold. dropped: how many of them are gone whose
    memory torch still keeps.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.dropped = 0

    def run(
        self,
        sequence: StepSequence,
        key: tuple,
        launch: Callable[[], None],
        answers: OffloadedSteps | None = None,
        n: int = 0,
    ) -> None:
        """Launch what `key` names for the first time, capture it the second time, and replay it
        then. answers: for the experts on the CPU, which are evaluated for n rows meanwhile.
        """
        if answers is not None:
            answers.prepare(n, torch.get_num_threads())
        graph = sequence.graphs.get(key)
        if graph is None and sequence.captures and key in sequence.seen:
            self._free_before_capture(sequence)
            graph = sequence.graphs[key] = self._capture(launch)
        with nullcontext() if answers is None else answers.turn(self.wait):
            if graph is not None:
                graph.replay()
                if answers is not None:
                    answers.run(n, torch.get_num_threads())
            else:
                with nullcontext() if answers is None else answered(answers, n):
                    launch()
                sequence.seen.add(key)

    def wait(self, asleep: bool = False) -> None:
        """Wait for everything that was launched. asleep: leave the processor to others."""
        event = torch.cuda.Event(blocking=asleep)
        torch.cuda.current_stream(self._device).record_event(event).synchronize()

    def _free_before_capture(self, sequence: StepSequence) -> None:
        """Free memory before a capture. What a captured launch allocates is in the private memory
        of its graph, which torch frees only on request.
        """
        if len(sequence.graphs) >= MOST_GRAPHS:
            oldest = next(iter(sequence.graphs))
            del sequence.graphs[oldest]
            sequence.seen.discard(oldest)
            self.dropped += 1
        if self.dropped >= _FREED_TOGETHER:
            self.dropped = 0
            torch.cuda.empty_cache()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        # thread_local: other threads may continue on their own streams
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            launch()
        here.wait_stream(self._stream)
        return graph

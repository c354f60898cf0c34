"""One to eight new rows of a sequence as one CUDA graph, from token ids to logits, or to the next
token.

Executors (registry `STEP`) launch kernels on the current stream; nothing in a step asks the host
for anything, so that the same launches can be captured once and replayed: token ids and positions
lie in device memory. A graph belongs to a sequence (its caches' addresses are in it), a number of
rows and what is wanted at the end. The first use runs the launches as they are, which also compiles
kernels that are not there yet; the second captures them.

A branch without an executor runs its module as the truth path has it, on whatever device it lies.
Such a step is not captured.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import torch

from ...errors import EvaluationError
from ..layers.batch import Batch
from ..network import Network
from ..sampling import Sampling
from .context import Context
from .registry import STEP, Slow, branches, choose
from .step_frame import STEP_ROWS, Frame, Sequence
from .step_layers import DeviceEmbedding, Output, SlowBranch, SlowEmbedding, SlowOutput
from .step_sampling import sampler

AHEAD = 4  # steps that are under way before the host asks for the first one's token
MOST_GRAPHS = 16  # of a sequence: a new one takes the place of the oldest
_FREED_TOGETHER = 16  # graphs: the memory of those that are gone stays reserved until then


class StepPath:
    """The executors of a network, and the graphs of the sequences that are being continued."""

    def __init__(self, network: Network, context: Context):
        """Slow if the network is not made of branches."""
        found = branches(network.blocks)
        if found is None:
            raise Slow("blocks that are not a mixer and a feed-forward layer one after the other")
        self.network, self.context = network, context
        self.frame = Frame(network, context, STEP_ROWS)
        self._embedding = _or_slow(context, DeviceEmbedding, SlowEmbedding, network.embedding)
        self._branches = [choose(STEP, branch, context) or SlowBranch(branch) for branch in found]
        self._output = _or_slow(context, Output, SlowOutput, network)
        self._sequences: dict[int, tuple[weakref.ref, Sequence]] = {}
        self.captures = all(
            part.captured for part in (self._embedding, *self._branches, self._output)
        )  # if a sequence's caches suit
        self._dropped = 0  # graphs
        self._stream = torch.cuda.Stream(context.device)

    @torch.no_grad()
    def extend(self, tokens: torch.Tensor, state, all_logits: bool = False) -> torch.Tensor:
        """Appends 1 to STEP_ROWS tokens: logits float32[vocab] after the last one, or float32[n,
        vocab].

        8, 4, 2 or 1 at a time: kernels are compiled for numbers of rows, and every number would
        want its own.
        """
        sequence, rows = self._sequence(state), []
        while len(tokens):
            n = 1 << len(tokens).bit_length() - 1
            sequence.begin(tokens[:n], state.n_past)
            self._run(sequence, state, n, "all" if all_logits else "last")
            state.n_past += n
            tokens = tokens[n:]
            if all_logits or not len(tokens):
                rows.append(
                    self.frame.logits[: n if all_logits else 1].to(
                        self.network.output_device, copy=True
                    )
                )
        return torch.cat(rows) if all_logits else rows[0][0]

    @torch.no_grad()
    def follow(self, token: int, state, n: int, sampling: Sampling) -> Iterator[int]:
        """Appends `token`, then each token that is drawn, and yields the up to `n` drawn ones: the
        last of them is not appended.

        `state.n_past` counts the tokens appended for what has been yielded. The host may stop
        asking at any time: steps that ran ahead leave cache rows that the next call overwrites.
        EvaluationError if logits are not finite.
        """
        n = min(n, state.capacity - state.n_past)
        sequence = self._sequence(state)
        sequence.begin([token], state.n_past, sampling.seed)
        ahead = (
            AHEAD
            if sequence.captures and all(branch.repeatable for branch in self._branches)
            else 1
        )
        under_way, started, position = deque(), 0, state.n_past
        try:
            while started < n or under_way:
                while started < n and len(under_way) < ahead:
                    state.n_past = position + started
                    self._run(sequence, state, 1, sampling)
                    under_way.append(torch.cuda.current_stream(self.context.device).record_event())
                    started += 1
                under_way.popleft().synchronize()
                state.n_past = position = position + 1
                started, n = started - 1, n - 1
                drawn = int(sequence.history[position])
                if drawn < 0:
                    raise EvaluationError(
                        f"the model's predictions for position {position} are not finite"
                    )
                yield drawn
        finally:
            for event in (
                under_way
            ):  # they write to host memory, which must not become somebody else's meanwhile
                event.synchronize()

    def _sequence(self, state) -> Sequence:
        held = self._sequences.get(id(state))
        if held is None or held[0]() is not state:
            key, mine = id(state), weakref.ref(self)

            def gone(_):
                path = mine()
                if path is not None and (old := path._sequences.pop(key, None)) is not None:
                    path._dropped += len(old[1].graphs)

            instead = self._instead(state)
            sequence = Sequence(
                state.capacity,
                STEP_ROWS,
                self.context.device,
                instead,
                self.captures and not instead,
            )
            held = self._sequences[key] = (weakref.ref(state, gone), sequence)
        return held[1]

    def _instead(self, state) -> dict[int, SlowBranch]:
        """What stands for executors that cannot take what this sequence keeps, by number: caches of
        other types than the model's.
        """
        found = {}
        for number, executor in enumerate(self._branches):
            try:
                executor.check(state)
            except Slow as reason:
                self.context.report(
                    type(executor.branch.module).__name__, str(reason), executor.branch.layer
                )
                found[number] = SlowBranch(executor.branch)
        self.context.report_all()
        return found

    def _run(self, sequence: Sequence, state, n: int, wanted: str | Sampling) -> None:
        key = (n, wanted if isinstance(wanted, str) else _without_seed(wanted))
        graph = sequence.graphs.get(key)
        with torch.cuda.device(self.context.device):
            if graph is None and sequence.captures and key in sequence.seen:
                self._make_room(sequence)
                graph = sequence.graphs[key] = self._capture(sequence, state, n, wanted)
            if graph is not None:
                graph.replay()
            else:
                self._launch(sequence, state, n, wanted)
                sequence.seen.add(key)

    def _make_room(self, sequence: Sequence) -> None:
        """Before a capture: what a captured launch allocates lies in memory of its graph's own,
        which torch gives back only when told.
        """
        if len(sequence.graphs) >= MOST_GRAPHS:
            oldest = next(iter(sequence.graphs))
            del sequence.graphs[oldest]
            sequence.seen.discard(oldest)
            self._dropped += 1
        if self._dropped >= _FREED_TOGETHER:
            self._dropped = 0
            torch.cuda.empty_cache()

    def _capture(
        self, sequence: Sequence, state, n: int, wanted: str | Sampling
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self.context.device)
        self._stream.wait_stream(here)
        # thread_local: other threads may go on with their own streams meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._launch(sequence, state, n, wanted)
        here.wait_stream(self._stream)
        return graph

    def _launch(self, sequence: Sequence, state, n: int, wanted: str | Sampling) -> None:
        frame = self.frame
        frame.begin(
            sequence,
            n,
            None if sequence.captures else Batch.of(1, n, state.n_past, self.context.device),
        )
        h = frame.buffer("h", self.network.output_norm.weight.numel())
        self._embedding(frame, h)
        for number, branch in enumerate(self._branches):
            sequence.instead.get(number, branch)(frame, h, state)
        self._output(frame, h if wanted == "all" else h[n - 1 : n])
        if not isinstance(wanted, str):
            sampler(frame, wanted)(frame.logits[0], sequence)
        frame.end()


def _without_seed(sampling: Sampling) -> tuple:
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def _or_slow(context: Context, fast: type, slow: type, part: object) -> object:
    try:
        return fast(part, context)
    except Slow as reason:
        context.report(fast.__name__, str(reason), 0)
        return slow(part, context)

"""One to eight new rows of a sequence as one CUDA graph, from token ids to logits, or to the next
token.

Executors (registry `STEP`) launch kernels on the current stream (`launches.py`). Nothing in a step
needs the host: token ids and positions are in device memory, so that the launches can be captured
once and replayed (`graphs.py`). A graph belongs to a sequence (it contains the addresses of its
caches), a number of rows and a kind of result. The first use launches the kernels directly, and
compiles missing ones; the second captures them.

A branch without an executor runs its module on the reference path, on the device of the module.
Such a step is not captured.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch

from ....cuda_kernels.matvec import several
from ....errors import EvaluationError
from ...cpu.offloaded_steps import OffloadedSteps
from ...cpu.plan import NotPlanned
from ...network.network import Network
from ...network.sampling import Sampling
from ...state.sequence import State
from ..common.context import Context
from ..common.registry import Slow
from .dense_and_experts import offloaded_of
from .frame import STEP_ROWS, Frame, StepSequence
from .graphs import StepGraphs
from .launches import StepLaunches
from .layers import SlowBranch, StepExecutor, StepRecurrent
from .links import named_waits
from .offloaded import answers_of
from .recurrent import recurrent_of

AHEAD = 4  # steps that run before the host waits for the token of the first one
# The same where a recurrent state has two places: the second step leaves the state that the first
# one has written.
_RECURRENT_AHEAD = 2
_OFFLOADED_AHEAD = 2  # where the host evaluates experts while a step runs
_BESIDE_SLOW = "experts on the CPU next to a layer on a slower path"


class StepPath:
    """The executors of a network, and the graphs of the sequences that are being continued."""

    def __init__(self, network: Network, context: Context):
        self.network, self.context = network, context
        self.frame = Frame(network, context, STEP_ROWS)
        self._launches = StepLaunches(network, context, self.frame)
        self._links, self._branches = self._launches.links, self._launches.branches
        self._recurrent: dict[int, StepRecurrent] = {
            number: found
            for number, x in enumerate(self._branches)
            if (found := recurrent_of(x)) is not None
        }
        self._sequences: dict[int, tuple[weakref.ref, StepSequence]] = {}
        # Steps are captured if a sequence's caches suit.
        self.captures = self._launches.captured
        self._offloaded = self._answers()
        self._graphs = StepGraphs(context.device)
        self._rounded = several.space(context.device)  # activations of several rows
        # What comes from and goes to other ranks that have other layers.
        self._between = torch.empty(STEP_ROWS, network.moved_width, device=context.device)

    def _answers(self) -> OffloadedSteps | None:
        """Return what answers for the experts that are on the CPU while steps run; None if there
        are none. It cannot if something else runs on the reference path, for which the host waits:
        then they do as well.
        """
        layers = [found for x in self._branches if (found := offloaded_of(x)) is not None]
        answers, reason = None, ""
        if layers and not self.captures:
            reason = _BESIDE_SLOW
        elif layers:
            try:
                answers = answers_of(layers, self.frame)
            except NotPlanned as error:
                reason = f"the CPU does not answer for experts while a graph runs: {error}"
        if (group := self.context.group) is not None:  # all ranks meet in the same way
            reason = next(filter(None, group.exchange(reason)), "")
        if not reason:
            return answers
        self.captures = False
        for number, slow in self._unanswered(reason).items():
            self._branches[number] = slow
        self.context.report_all()
        return None

    def _unanswered(self, reason: str) -> dict[int, StepExecutor]:
        """Return, by number, replacements for executors whose experts are on the CPU, and report
        why these do not run beside a graph.
        """
        found: dict[int, StepExecutor] = {}
        for number, x in enumerate(self._branches):
            if offloaded_of(x) is not None:
                self.context.report(type(x.branch.module).__name__, reason, x.branch.layer)
                found[number] = SlowBranch(x.branch)
        return found

    @torch.no_grad()
    def extend(self, tokens: torch.Tensor, state: State, all_logits: bool = False) -> torch.Tensor:
        """Appends 1 to STEP_ROWS tokens: logits float32[vocab] after the last one, or float32[n,
        vocab].

        They are evaluated 8, 4, 2 or 1 at a time, as every number of rows needs its own kernels.
        """
        sequence, rows = self._sequence(state), []
        self._begin_answers()
        while len(tokens):
            n = 1 << len(tokens).bit_length() - 1
            self._check_recurrent(state)
            sequence.begin(tokens[:n], state.n_past)
            state.reserve(n)
            self._run(sequence, state, n, "all" if all_logits else "last")
            state.advance(n)
            tokens = tokens[n:]
            if all_logits or not len(tokens):
                rows.append(
                    self.frame.logits[: n if all_logits else 1].to(
                        self.network.output_device, copy=True
                    )
                )
        return torch.cat(rows) if all_logits else rows[0][0]

    @torch.no_grad()
    def follow(self, token: int, state: State, n: int, sampling: Sampling) -> Iterator[int]:
        """Append `token`, then each drawn token, and yield the drawn tokens, at most `n`; the last
        one is not appended.

        `state.n_past` counts the tokens appended for what has been yielded. The caller may stop at
        any time: steps that ran ahead leave cache rows that the next call overwrites. Recurrent
        states are those of `state.n_past` tokens once the iterator has ended or is closed, not
        before. EvaluationError if logits are not finite.
        """
        n = min(n, state.capacity - state.n_past)
        sequence = self._sequence(state)
        self._check_recurrent(state)
        self._begin_answers()
        sequence.begin([token], state.n_past, sampling.seed)
        ahead = self._ahead(sequence)
        if self.network.stage is not None:
            # A caller that stops leaves steps that all ranks have begun.
            ahead = min(self.network.stage.line.exchange(ahead))
        under_way, started, position = deque(), 0, state.n_past
        try:
            while started < n or under_way:
                while started < n and len(under_way) < ahead:
                    state.reserve(started + 1)
                    self._run(sequence, state, 1, sampling)
                    under_way.append(torch.cuda.current_stream(self.context.device).record_event())
                    started += 1
                with named_waits(self._links, self.context):
                    under_way.popleft().synchronize()
                state.advance(1)
                position = state.n_past
                started, n = started - 1, n - 1
                drawn = int(sequence.history[position])
                if drawn < 0:
                    raise EvaluationError(
                        f"the model's predictions for position {position} are not finite"
                    )
                yield drawn
        finally:
            for event in under_way:  # they write to host memory, which must not be reused before
                event.synchronize()
            if sequence.alternates:
                self._settle(sequence, state)

    def _ahead(self, sequence: StepSequence) -> int:
        """Return the steps that run before the host waits for the first one, and let recurrent
        states alternate between two places if these are more than one.
        """
        sequence.alternates = False
        if not sequence.captures:
            return 1
        if all(branch.repeatable for branch in self._branches):
            return AHEAD if self._offloaded is None else _OFFLOADED_AHEAD
        others = [x for x in self._branches if recurrent_of(x) is None]
        sequence.alternates = all(branch.repeatable for branch in others)
        return _RECURRENT_AHEAD if sequence.alternates else 1

    def _settle(self, sequence: StepSequence, state: State) -> None:
        """Put recurrent states where they belong after steps that alternate."""
        recurrent = self._recurrent.values()
        held = [layer.state(state) for layer in recurrent]
        if (state.n_past - sequence.start) % 2:
            places = [layer.other(state, sequence) for layer in recurrent]
            # Torch has no public name for it.
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [x for one in held for x in (one.inputs, one.memory)],
                [x for place in places for x in place],
            )
        for one in held:
            one.n_seen = state.n_past

    def _sequence(self, state: State) -> StepSequence:
        held = self._sequences.get(id(state))
        if held is None or held[0]() is not state:
            key, mine = id(state), weakref.ref(self)

            def gone(_):
                path = mine()
                if path is not None and (old := path._sequences.pop(key, None)) is not None:
                    path._graphs.dropped += len(old[1].graphs)

            instead = self._instead(state)
            sequence = StepSequence(
                state.capacity,
                STEP_ROWS,
                self.context.device,
                instead,
                self.captures and not instead,
            )
            held = self._sequences[key] = (weakref.ref(state, gone), sequence)
        return held[1]

    def _instead(self, state: State) -> dict[int, StepExecutor]:
        """Return, by number, replacements for executors that cannot use what this sequence keeps:
        caches of other types than the model's.
        """
        found: dict[int, StepExecutor] = {}
        taken: list[StepExecutor | None] = []
        for executor in self._branches:
            try:
                executor.check(state)
                taken.append(executor)
            except Slow as reason:
                self.context.report(
                    type(executor.branch.module).__name__, reason, executor.branch.layer
                )
                taken.append(None)
        for number, executor in enumerate(self.context.same_choices(taken)):
            if executor is None:
                found[number] = SlowBranch(self._branches[number].branch)
        if found:  # the host waits for these: it cannot answer for experts meanwhile
            found |= self._unanswered(_BESIDE_SLOW)
        self.context.report_all()
        return found

    def _check_recurrent(self, state: State) -> None:
        """UsageError if recurrent states are not those of the tokens that are in the sequence."""
        for layer in self._recurrent.values():
            layer.state(state).check(state.n_past, layer.layer)

    def _run(self, sequence: StepSequence, state: State, n: int, wanted: str | Sampling) -> None:
        for number, layer in self._recurrent.items():
            if number not in sequence.instead:  # the reference path counts for itself
                layer.state(state).n_seen += n
        key = (n, wanted if isinstance(wanted, str) else _without_seed(wanted))
        stage, launches = self.network.stage, self._launches
        with torch.cuda.device(self.context.device), several.lent(self._rounded):
            if stage is None:
                launch = partial(launches.step, sequence, state, n, wanted)
                answers = self._offloaded if sequence.captures else None
                self._graphs.run(sequence, key, launch, answers, n)
                return
            # What moves between ranks is in no graph.
            answers = self._offloaded if sequence.captures else None
            passage = stage.take(between := self._between[:n])
            if answers is not None:  # asleep, as long as others use the processor
                self._graphs.wait(asleep=True)
            layers = partial(launches.layers, sequence, state, n, wanted, between)
            self._graphs.run(sequence, (*key, "layers"), layers, answers, n)
            passage.copy_(stage.hand_on(passage, n))
            output = partial(launches.output, sequence, n, wanted, between)
            self._graphs.run(sequence, (*key, "output"), output)

    def _begin_answers(self) -> None:
        """Wait for what was launched before steps for which the host answers: it cannot be
        interrupted while it waits for them to ask.
        """
        if self._offloaded is not None:
            self._graphs.wait()


def _without_seed(sampling: Sampling) -> tuple:
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

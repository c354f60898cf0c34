"""How fast a model runs: the tests of llama-bench, each repeated, as samples in nanoseconds.

    pp N      a prompt of N random tokens, in batches
    tg N      N tokens generated from an empty context
    pg P,G    a prompt of P tokens and then G generated ones, in one span of time
    gp P,G    G tokens generated after a prompt of P tokens, whose time does not count

With a depth D there are D tokens in the context before, whose time does not count; repetitions
share what precedes their own tokens if a context can be cut back to it. The first token is BOS
where the model wants it, the others of prompts are random. Tokens are generated as `iqforge
generate` does it, by `Model.follow` with its default `Sampling`: each is drawn from the logits of
the one before and handed to the host, all of which is in the time. (llama-bench samples nothing: it
appends random tokens and waits for the device after each.)
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...errors import UsageError
from ...formats import arguments
from ..network.sampling import Sampling
from ..parallel.alike import check_alike
from ..state.cache import CacheSettings
from ..state.sequence import Snapshot, State
from .cost import Cost
from .memory_check import check_cpu_memory

_WARM_STEPS = 4  # a captured graph is replayed from the second one on
_WARM_PROMPTS = 3  # with graphs; see `Runner.warm_up`


@dataclass(frozen=True)
class Test:
    """One test. `n_prompt`, `n_gen`: timed tokens; `before`: tokens of a `gp` test's prompt;
    `depth`: tokens before everything.
    """

    __test__ = False  # no test for pytest

    n_prompt: int = 0
    n_gen: int = 0
    before: int = 0
    depth: int = 0

    def __post_init__(self):
        for name in ("n_prompt", "n_gen", "before", "depth"):
            arguments.whole_number(name, getattr(self, name), 0)

    @property
    def label(self) -> str:
        """The name in tables, such as `pp512 @ d4096`."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return (
            "+".join(parts)
            + (f"@pp{self.before}" if self.before else "")
            + (f" @ d{self.depth}" if self.depth else "")
        )

    @property
    def n_tokens(self) -> int:
        """Tokens that a speed is about."""
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        """Tokens that the context must hold."""
        return self.depth + self.before + self.n_tokens


@dataclass
class Result:
    """Samples of one test. Rates are in tokens/s; shares are between 0 and 1, and None if no limit
    is known.
    """

    test: Test
    samples_ns: list[int]
    cost: Cost
    n_batch: int
    finished: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of every sample."""
        return [1e9 * self.test.n_tokens / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        """The mean of the tokens per second."""
        return mean(self.samples_ts)

    @property
    def bytes_per_second(self) -> float | None:
        """Return the bytes that must be read over the time taken, for tests that only generate."""
        t = self.test
        if t.n_prompt or not t.n_gen:
            return None
        return self.cost.generation_bytes(t.depth + t.before, t.n_gen) / t.n_tokens * self.avg_ts

    @property
    def flop_per_second(self) -> float | None:
        """Return the operations per second, for tests of a prompt alone."""
        t = self.test
        if t.n_gen or not t.n_prompt:
            return None
        return self.cost.prompt_flop(t.depth, t.n_prompt, self.n_batch) / t.n_tokens * self.avg_ts


def mean(samples: list[float]) -> float:
    """Return the mean. Raise ZeroDivisionError for no samples."""
    return sum(samples) / len(samples)


def deviation(samples: list[float]) -> float:
    """Sample standard deviation, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    average = mean(samples)
    return math.sqrt(sum((x - average) ** 2 for x in samples) / (len(samples) - 1))


@contextmanager
def short_collections() -> Iterator[None]:
    """Let garbage collections visit only objects that are made from now on.

    With torch loaded there are 300,000 others, and visiting them takes 0.1 s: longer than a prompt,
    in whichever sample it happens. Other ranks wait for it as well.
    """
    if gc.get_freeze_count():  # by the caller, who unfreezes them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_test(
    model,
    test: Test,
    settings: CacheSettings | None = None,
    *,
    n_batch: int = 2048,
    repetitions: int = 5,
    warmup: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Measure one test on a `Model`. The context holds exactly the tokens of the test. UsageError
    where the cache types do not fit, DeviceError where the memory does not suffice, EvaluationError
    for logits that are not finite where tokens are generated.
    """
    if arguments.whole_number("repetitions", repetitions, 1) and not test.n_tokens:
        raise UsageError("there is nothing to measure: a test of 0 tokens")
    arguments.whole_number("n_batch", n_batch, 1)
    arguments.callback("progress", progress)
    if model.group is not None:
        asked = {"-p, -n, -pg, -gp or -d": test.label, "-b": str(n_batch), "-r": str(repetitions)}
        check_alike(model.group, asked | {"-w": str(warmup)})
    check_cpu_memory(model, context=test.n_ctx, rows=min(n_batch, model.ubatch))
    state = model.new_state(test.n_ctx, settings)
    result = Result(test, [], Cost.of(model, state), n_batch)
    runner = Runner(model, state, n_batch, torch.Generator().manual_seed(seed))
    before, say = test.depth + test.before, progress or (lambda line: None)
    if warmup:
        say("warm-up")
        runner.warm_up(test.n_prompt, test.n_gen, before)
    for repetition in range(repetitions):
        if before and not runner.holds(before):
            say(f"repetition {repetition + 1} of {repetitions}, filling the context")
        runner.fill(before)
        say(f"repetition {repetition + 1} of {repetitions}")
        with short_collections():
            runner.wait()
            start = time.perf_counter_ns()
            runner.prompt(test.n_prompt)
            runner.generate(test.n_gen)
            runner.wait()
            result.samples_ns.append(time.perf_counter_ns() - start)
    result.finished = time.time()
    return result


class Runner:
    """Random prompts into one sequence, and tokens that follow from them."""

    def __init__(self, model, state: State, n_batch: int, generator: torch.Generator):
        self.model, self.state, self.n_batch, self.generator = model, state, n_batch, generator
        self.sampling = Sampling(seed=generator.initial_seed())
        self.device = torch.device(model.device)
        self.bos = first_token(model)
        self._filled = 0  # tokens that the context was filled with
        self._start: Snapshot | None = None

    def holds(self, n: int) -> bool:
        """Return whether the context was filled with n tokens and what came after them can be cut
        off.
        """
        return n == self._filled and (n == 0 or self._start is not None)

    def fill(self, n: int) -> None:
        """Fill the context with n random tokens, or cut it back to them. (Passes of other sizes
        would replace the graphs of the measured ones, which would then be captured while they are
        measured.)
        """
        if self._start is not None and self.holds(n):
            self.state.restore(self._start)
            return
        self.state.clear()
        self.prompt(n)
        self._filled, self._start = n, self.state.snapshot()

    def prompt(self, n: int) -> None:
        """Evaluate a prompt of n random tokens in batches, and wait for the device."""
        for piece in self._tokens(n).split(self.n_batch) if n else ():
            self.model.extend(piece, self.state)
        self.wait()

    def generate(self, n: int) -> None:
        """n steps: append a random token (or BOS) and n - 1 drawn ones, and draw the next one.
        Returns when the host has it.
        """
        if n:
            [token] = self._tokens(1).tolist()
            deque(self.model.follow(token, self.state, n, self.sampling), maxlen=0)

    def warm_up(self, n_prompt: int, n_gen: int, before: int = 0) -> None:
        """Do what only the first uses of a model need, for a prompt of n_prompt tokens after
        `before` others and for n_gen generated ones. The caller resets the state.

        A device with graphs captures a step when it comes for the second time; passes of a prompt
        in the first, second or third one of as many rows, and again where buffers have grown since,
        be it by what fills the context. Without graphs one prompt is enough to compile and to
        allocate, and on the CPU more would take long.
        """
        graphs = self.model.engine is not None
        before = before if graphs else 0
        for _ in range((_WARM_PROMPTS if graphs else 1) if n_prompt else 0):
            self.fill(before)
            self.prompt(n_prompt)
        for _ in range(2 if graphs and n_gen == 1 else 1):
            self.fill(before)
            self.generate(min(n_gen, _WARM_STEPS))

    def wait(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tokens(self, n: int) -> torch.Tensor:
        tokens = torch.randint(0, self.model.n_vocab, (n,), generator=self.generator)
        if n and self.state.n_past == 0 and self.bos is not None:
            tokens[0] = self.bos
        return tokens


def first_token(model) -> int | None:
    """BOS if the model's vocabulary wants it in front; None for a model without a vocabulary."""
    if "tokenizer.ggml.model" not in model.source.metadata:
        return None
    special = model.special_tokens
    return special.bos if special.add_bos else None

"""Scores of tasks with several answers: the answer whose tokens are the most probable ones on
average is the one that the model chooses. Counted as llama-perplexity counts it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import EvaluationError
from ..model import Model
from .chunks import DEFAULT_BATCH, DEFAULT_CONTEXT
from .perplexity import refuse_peers
from .scores import negative_log_likelihood
from .task_files import Gap, Question

_SHORT = 3  # tokens after the common prefix; more than that leave the choice itself out


@dataclass(frozen=True)
class Candidate:
    """The tokens of a task with one of its answers. Those from `first` to `stop` are scored."""

    tokens: list[int]
    first: int
    stop: int


@dataclass(frozen=True)
class TaskItem:
    """What the model chose in one task. `scores`: mean log-probability of each answer. `accuracy`:
    the share of right choices so far, this one included.
    """

    scores: tuple[float, ...]
    chosen: int
    is_right: bool
    accuracy: float


@dataclass(frozen=True)
class TaskScore:
    """Choices in a file of tasks."""

    items: tuple[TaskItem, ...]
    n_answers: int  # of all tasks together
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of right choices."""
        return self.items[-1].accuracy

    @property
    def error(self) -> float:
        """Standard error of `accuracy`."""
        return _error(self.accuracy, len(self.items))

    @property
    def random_chance(self) -> tuple[float, float]:
        """Expected share of right choices of one who guesses, with its standard error."""
        p = len(self.items) / self.n_answers
        return p, _error(p, len(self.items))


def measure_tasks(
    model: Model,
    tasks: Sequence[Question] | Sequence[Gap],
    *,
    n_ctx: int = DEFAULT_CONTEXT,
    batch_tokens: int = DEFAULT_BATCH,
    on_task: Callable[[int, TaskItem], None] | None = None,
) -> TaskScore:
    """Let `model` choose an answer in each task. `on_task(index, item)` is called after each.

    Raise EvaluationError for a task that does not fit a context of `n_ctx` tokens, or whose answers
    have no token that could be scored.
    """
    refuse_peers(model, "tasks are scored")
    started, items, n_right, n_answers = time.monotonic(), [], 0, 0
    prepared = [_checked(_prepare(model, task), i, n_ctx) for i, task in enumerate(tasks)]
    for batch in _batches(prepared, batch_tokens):
        for scores in _evaluate(model, batch):
            task = tasks[len(items)]
            n_answers += len(scores)
            if isinstance(task, Gap):
                chosen = 0 if scores[0] > scores[1] else 1
                is_right = chosen == task.right
            else:
                chosen = int(np.argmax(scores))
                is_right = chosen in task.right
            n_right += is_right
            item = TaskItem(tuple(scores), chosen, is_right, n_right / (len(items) + 1))
            items.append(item)
            if on_task is not None:
                on_task(len(items) - 1, item)
    return TaskScore(tuple(items), n_answers, time.monotonic() - started)


def _prepare(model: Model, task: Question | Gap) -> list[Candidate]:
    encode = model.tokenizer.encode
    if isinstance(task, Question):
        texts = [encode(f"{task.text} {answer}") for answer in task.answers]
        prefix = _common_prefix(texts)
        return [Candidate(tokens, prefix, len(tokens)) for tokens in texts]
    texts = [encode(task.before + choice + task.after) for choice in task.choices]
    firsts = [_common_prefix(texts)] * 2
    if all(len(tokens) - firsts[0] > _SHORT for tokens in texts):
        firsts = [len(encode(task.before + choice)) for choice in task.choices]
    # The full stop after the sentence says nothing.
    return [
        Candidate(tokens, first, len(tokens) - (len(tokens) - first > 1))
        for tokens, first in zip(texts, firsts, strict=True)
    ]


def _common_prefix(texts: Sequence[Sequence[int]]) -> int:
    for n, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return n
    return min(map(len, texts))


def _checked(candidates: list[Candidate], index: int, n_ctx: int) -> list[Candidate]:
    longest = max(len(c.tokens) for c in candidates)
    if longest > n_ctx:
        raise EvaluationError(
            f"task {index + 1} does not fit in the context window: it has {longest} tokens, -c is"
            f" {n_ctx}"
        )
    if any(not 0 < c.first < c.stop for c in candidates):
        raise EvaluationError(
            f"task {index + 1} has an answer without a token that could be scored"
        )
    return candidates


def _batches(
    prepared: Sequence[list[Candidate]], batch_tokens: int
) -> Iterator[list[list[Candidate]]]:
    """Yield tasks whose sequences, all as long as the longest, have at most `batch_tokens`."""
    batch: list[list[Candidate]] = []
    longest = rows = 0
    for task in prepared:
        longest = max(longest, *(len(c.tokens) for c in task))
        rows += len(task)
        if batch and longest * rows > batch_tokens:
            yield batch
            batch, longest, rows = [], max(len(c.tokens) for c in task), len(task)
        batch.append(task)
    if batch:
        yield batch


def _evaluate(model: Model, batch: Sequence[list[Candidate]]) -> Iterator[list[float]]:
    """Yield the scores of the answers of each task. What follows a sequence changes nothing in it,
    so that shorter ones are filled up.
    """
    candidates = [c for task in batch for c in task]
    longest = max(len(c.tokens) for c in candidates)
    tokens = torch.zeros(len(candidates), longest, dtype=torch.int64)
    for row, c in enumerate(candidates):
        tokens[row, : len(c.tokens)] = torch.tensor(c.tokens)
    hidden = model.hidden(tokens)
    row = 0
    for task in batch:
        states = [hidden[row + i, c.first - 1 : c.stop - 1] for i, c in enumerate(task)]
        targets = [np.asarray(c.tokens[c.first : c.stop], dtype=np.int64) for c in task]
        nll = negative_log_likelihood(model.logits(torch.cat(states)), np.concatenate(targets))
        if not np.isfinite(nll).all():
            raise EvaluationError("the model's predictions are not finite", file=model.source.path)
        ends = np.cumsum([len(t) for t in targets])[:-1]
        yield [-float(part.mean()) for part in np.split(nll, ends)]
        row += len(task)


def _error(p: float, n: int) -> float:
    return math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else 0.0

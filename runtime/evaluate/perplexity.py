"""Perplexity of a model on a text, counted as llama.cpp's tool counts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from ...errors import EvaluationError, UsageError
from ...formats.output import refuse_same_file
from ..model import Model
from .base_file import BaseWriter
from .chunks import DEFAULT_BATCH, DEFAULT_CONTEXT, Chunks, Clock, ProgressCallback
from .compact_base import CompactWriter
from .scores import Moments, exp_or_inf, negative_log_likelihood
from .turns import in_turns


@dataclass(frozen=True)
class RunningScore:
    """Cumulative score after one chunk, which starts at token `start`."""

    start: int
    perplexity: float
    mean_nll: float
    nll_error: float


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood over `n_scored` tokens of `n_chunks` chunks of
    `n_ctx`.

    `uncertainty` is perplexity times the standard error of the mean negative log-likelihood.
    """

    perplexity: float
    uncertainty: float
    mean_nll: float
    n_scored: int
    n_chunks: int
    n_ctx: int
    seconds: float
    running: tuple[RunningScore, ...] = field(repr=False, default=())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, with those that are not scored."""
        return self.n_chunks * self.n_ctx / max(self.seconds, 1e-9)


def measure_perplexity(
    model: Model,
    text: str | Sequence[int],
    *,
    n_ctx: int = DEFAULT_CONTEXT,
    chunks: int = -1,
    batch_tokens: int = DEFAULT_BATCH,
    save_logits: str | os.PathLike | None = None,
    compact: bool = False,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Perplexity of `model` on `text` (or its tokens) over chunks of `n_ctx`, at most `chunks` of
    them if that is positive.

    `batch_tokens` evaluates several chunks per pass. `save_logits` also writes the base file for
    divergences, in the layout of `compact_base` if `compact`. EvaluationError for a text that is
    too short or for logits that are not finite, OutputError for a base file that is a file of the
    model, UsageError for a base file of ranks that share windows.
    """
    if save_logits is not None:
        refuse_peers(model, "predictions are saved")
        refuse_same_file(save_logits, model.source.files)
    cut = Chunks.of_text(model, text, n_ctx, chunks)
    writer = CompactWriter if compact else BaseWriter
    scores, running, clock = Moments(), [], Clock(cut, progress)
    with nullcontext() if save_logits is None else writer(save_logits, cut, model.n_vocab) as base:

        def evaluate(span: tuple[int, int]) -> list[np.ndarray]:
            found = []
            for chunk, logits in cut.scored_logits_of(model, *span):
                found.append(negative_log_likelihood(logits, cut.targets(chunk)))
                check_finite(found[-1], model, chunk)
                if base is not None:
                    base.write(logits)
            return found

        for (first, _), found in in_turns(cut.passes(batch_tokens), evaluate, model.peers):
            for chunk, nll in enumerate(found, first):
                scores.add(nll)
                running.append(
                    RunningScore(chunk * n_ctx, exp_or_inf(scores.mean), scores.mean, scores.error)
                )
                clock.report(chunk, running[-1].perplexity)
    last = running[-1]
    return Perplexity(
        last.perplexity,
        last.perplexity * last.nll_error,
        last.mean_nll,
        scores.n,
        len(cut),
        n_ctx,
        clock.seconds,
        tuple(running),
    )


def refuse_peers(model: Model, what: str) -> None:
    """UsageError if ranks share windows, while `what` needs all of them in one process."""
    if model.peers is not None:
        raise UsageError(f"{what} by one process only: not with -sm data")


def check_finite(nll: np.ndarray, model: Model, chunk: int) -> None:
    """EvaluationError if the model produced something that is not finite."""
    if not np.isfinite(nll).all():
        raise EvaluationError(
            f"the model's predictions in chunk {chunk + 1} are not finite", file=model.source.path
        )

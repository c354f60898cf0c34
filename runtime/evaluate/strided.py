"""Perplexity over windows that overlap: each target has almost the whole window in front of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import EvaluationError
from ..model import Model
from ..state.cache import PADDING
from .chunks import (
    DEFAULT_BATCH,
    DEFAULT_CONTEXT,
    Chunks,
    Clock,
    ProgressCallback,
    ShortTextError,
    bos_token,
)
from .perplexity import Perplexity, RunningScore, check_finite, refuse_peers
from .scores import Moments, exp_or_inf, negative_log_likelihood


def window_length(n_ctx: int, stride: int, batch_tokens: int, flash_attention: bool = True) -> int:
    """Return the tokens per window: those of llama-perplexity's context, which holds as many chunks
    as a batch, and half a stride more; a multiple of 256 with flash attention.
    """
    window = max(1, batch_tokens // n_ctx) * n_ctx + stride // 2
    return -(-window // PADDING) * PADDING if flash_attention else window


def measure_strided(
    model: Model,
    text: str | Sequence[int],
    stride: int,
    *,
    n_ctx: int = DEFAULT_CONTEXT,
    chunks: int = -1,
    batch_tokens: int = DEFAULT_BATCH,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Perplexity of `model` on `text` (or its tokens), counted over the last `stride` targets of
    windows that begin every `stride` tokens; at most `chunks` windows if that is positive.

    `n_ctx` of the result is the length of a window; see `window_length`. BOS is where the tokenizer
    puts it, at the start of the text. Raise EvaluationError for a text of less than two windows, or
    for a stride that is not within a window.
    """
    refuse_peers(model, "windows that overlap are scored")
    bos_token(model)
    window = window_length(n_ctx, stride, batch_tokens, model.weights.switches.flash_attention)
    if not 0 < stride < window:
        raise EvaluationError(f"the stride is {stride}, expected 1 to {window - 1}")
    tokens = model.tokenizer.encode(text) if isinstance(text, str) else text
    if len(tokens) < 2 * window:
        raise ShortTextError(
            f"the text has {len(tokens)} token{'s' * (len(tokens) != 1)}, windows of {window} need"
            f" at least {2 * window}"
        )
    n_windows = -(-(len(tokens) - window) // stride)
    n_windows = min(n_windows, chunks) if chunks > 0 else n_windows
    views = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.int64), window)
    cut = Chunks(views[::stride][:n_windows], None)
    scores, running, clock = Moments(), [], Clock(cut, progress)
    for start, stop in cut.passes(batch_tokens):
        for index, states in enumerate(model.hidden(cut.inputs(start, stop)), start):
            targets = cut.tokens[index, -stride:].copy()  # the view cannot be written
            nll = negative_log_likelihood(model.logits(states[-stride - 1 : -1]), targets)
            check_finite(nll, model, index)
            scores.add(nll)
            running.append(
                RunningScore(index * stride, exp_or_inf(scores.mean), scores.mean, scores.error)
            )
            clock.report(index, running[-1].perplexity)
    last = running[-1]
    return Perplexity(
        last.perplexity,
        last.perplexity * last.nll_error,
        last.mean_nll,
        scores.n,
        len(cut),
        window,
        clock.seconds,
        tuple(running),
    )

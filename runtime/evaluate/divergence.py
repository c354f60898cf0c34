"""How far a model's predictions are from those of a base model: Kullback-Leibler divergence and its
companions.

p is the base (from its file), q the model under test. Formulas are those of llama.cpp's perplexity
tool, so that its published tables can be compared.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ...errors import EvaluationError
from ..model import Model
from .base_file import BaseFile
from .chunks import (
    DEFAULT_BATCH,
    DEFAULT_CONTEXT,
    Chunks,
    Clock,
    ProgressCallback,
    bos_token,
)
from .compact_base import CompactBase, open_base
from .perplexity import check_finite, refuse_peers
from .scores import Compared, Moments, compare_all, exp_or_inf, log_sum_exp

log = logging.getLogger(__name__)

_FEW = 10  # no error bars from so few tokens


@dataclass
class Statistics:
    """Everything that is accumulated over scored tokens. Means are over all tokens added so far."""

    nll: Moments = field(default_factory=Moments)
    nll_base: Moments = field(default_factory=Moments)
    kld: Moments = field(default_factory=Moments)
    delta_p: Moments = field(default_factory=Moments)
    delta_p_squared: Moments = field(default_factory=Moments)
    nll_product: float = 0.0
    n_same_top: int = 0
    kld_values: list[np.ndarray] = field(default_factory=list, repr=False)
    delta_p_values: list[np.ndarray] = field(default_factory=list, repr=False)
    kld_least: Moments | None = None
    kld_variance: float = 0.0

    def add(self, found: Compared) -> None:
        """Add the tokens of a chunk."""
        nll, nll_base, kld = found.nll, found.nll_base, found.kld
        delta_p = np.exp(-nll) - np.exp(-nll_base)
        for moments, values in (
            (self.nll, nll),
            (self.nll_base, nll_base),
            (self.kld, kld),
            (self.delta_p, delta_p),
            (self.delta_p_squared, delta_p**2),
        ):
            moments.add(values)
        self.nll_product += float((nll * nll_base).sum())
        self.n_same_top += int(found.same_top.sum())
        if found.least is not None and found.variance is not None:
            self.kld_least = self.kld_least or Moments()
            self.kld_least.add(found.least)
            self.kld_variance += float(found.variance.sum())
        self.kld_values.append(kld)
        self.delta_p_values.append(delta_p)

    @property
    def n(self) -> int:
        """Tokens that were scored."""
        return self.nll.n

    @property
    def ppl(self) -> tuple[float, float]:
        """Perplexity of the model under test and its uncertainty; likewise below."""
        value = exp_or_inf(self.nll.mean)
        return value, value * _error(self.nll)

    @property
    def ppl_base(self) -> tuple[float, float]:
        """Perplexity of the base and its uncertainty."""
        value = exp_or_inf(self.nll_base.mean)
        return value, value * _error(self.nll_base)

    @property
    def covariance(self) -> float:
        """Return the covariance of the two mean negative log-likelihoods."""
        return (
            0.0
            if self.n < _FEW
            else (self.nll_product / self.n - self.nll.mean * self.nll_base.mean) / (self.n - 1)
        )

    @property
    def correlation(self) -> float:
        """Correlation of ln(PPL(q)) and ln(PPL(p)); NaN if one of them has no variance."""
        product = _error(self.nll) * _error(self.nll_base)
        return self.covariance / product if product else math.nan

    @property
    def log_ratio(self) -> tuple[float, float]:
        """ln(PPL(Q) / PPL(base))."""
        variance = _error(self.nll) ** 2 + _error(self.nll_base) ** 2 - 2 * self.covariance
        return self.nll.mean - self.nll_base.mean, math.sqrt(max(0.0, variance))

    @property
    def ratio(self) -> tuple[float, float]:
        """PPL(q) / PPL(p) and its uncertainty."""
        value, error = self.log_ratio
        return exp_or_inf(value), exp_or_inf(value) * error

    @property
    def difference(self) -> tuple[float, float]:
        """PPL(Q) - PPL(base)."""
        (q, q_error), (base, base_error) = self.ppl, self.ppl_base
        variance = q_error**2 + base_error**2 - 2 * q * base * self.covariance
        return q - base, math.sqrt(max(0.0, variance))

    @property
    def mean_kld(self) -> tuple[float, float]:
        """Mean KL divergence in nats, and its uncertainty."""
        return self.kld.mean, _error(self.kld)

    @property
    def kld_bounds(self) -> tuple[float, float] | None:
        """What the mean divergence is at least, and the standard error of its estimate from a
        compact base; None for a base with all probabilities.
        """
        if self.kld_least is None:
            return None
        return self.kld_least.mean, math.sqrt(self.kld_variance) / self.n

    @property
    def mean_delta_p(self) -> tuple[float, float]:
        """Mean change of the probability of the correct token, and its uncertainty."""
        return self.delta_p.mean, _error(self.delta_p)

    @property
    def rms_delta_p(self) -> tuple[float, float]:
        """Root mean square of the change of that probability, and its uncertainty."""
        rms = math.sqrt(self.delta_p_squared.mean)
        return rms, 0.5 / rms * _error(self.delta_p_squared) if rms else 0.0

    @property
    def same_top(self) -> tuple[float, float]:
        """Share of tokens whose most probable continuation is the same."""
        p = self.n_same_top / self.n
        return p, math.sqrt(p * (1 - p) / (self.n - 1)) if self.n > 1 else 0.0

    def kld_quantiles(self, *fractions: float) -> list[float]:
        """Linear interpolation between order statistics; 0 is the minimum, 1 the maximum."""
        return np.quantile(np.concatenate(self.kld_values), fractions).tolist()

    def delta_p_quantiles(self, *fractions: float) -> list[float]:
        """Return the quantiles at `fractions`, 0 to 1, of the change of that probability."""
        return np.quantile(np.concatenate(self.delta_p_values), fractions).tolist()


@dataclass(frozen=True)
class Divergence:
    """Result of a comparison over `n_chunks` chunks of `n_ctx` tokens."""

    statistics: Statistics
    n_chunks: int
    n_ctx: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """Perplexity of the model."""
        return self.statistics.ppl[0]

    @property
    def uncertainty(self) -> float:
        """Uncertainty of the perplexity."""
        return self.statistics.ppl[1]

    @property
    def mean_kld(self) -> float:
        """Mean KL divergence in nats."""
        return self.statistics.mean_kld[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, with those that are not scored."""
        return self.n_chunks * self.n_ctx / max(self.seconds, 1e-9)


Base = BaseFile | CompactBase


def measure_divergence(
    model: Model,
    base: str | os.PathLike | Base,
    *,
    chunks: int = -1,
    batch_tokens: int = DEFAULT_BATCH,
    progress: ProgressCallback | None = None,
    on_chunk: Callable[[int, Statistics], None] | None = None,
    on_compared: Callable[[int, torch.Tensor, Compared], None] | None = None,
) -> Divergence:
    """Compare `model` with the base file's predictions on the text inside that file.

    `on_chunk(chunk, statistics so far)` is called after each chunk, and `on_compared(chunk, logits,
    values of its tokens)` before it. A different vocabulary size is only logged; what both have is
    compared. Errors of `open_base`, EvaluationError for predictions that are not finite.
    """
    refuse_peers(model, "predictions are compared")
    base = base if isinstance(base, Base) else open_base(base)
    _warn_of_sizes(base.n_vocab, model, "the base file has")
    cut = Chunks(base.tokens[:chunks] if chunks > 0 else base.tokens, bos_token(model))
    statistics, clock = Statistics(), Clock(cut, progress)
    for chunk, logits in cut.scored_logits(model, batch_tokens):
        found = base.compare(chunk, logits, cut.targets(chunk))
        check_finite(found.nll, model, chunk)
        statistics.add(found)
        if on_compared is not None:
            on_compared(chunk, logits, found)
        if on_chunk is not None:
            on_chunk(chunk, statistics)
        clock.report(chunk, statistics.ppl[0])
    return Divergence(statistics, len(cut), cut.n_ctx, clock.seconds)


def measure_divergence_between(
    model: Model,
    base: Model,
    text: str,
    *,
    n_ctx: int = DEFAULT_CONTEXT,
    chunks: int = -1,
    batch_tokens: int = DEFAULT_BATCH,
    progress: ProgressCallback | None = None,
    on_chunk: Callable[[int, Statistics], None] | None = None,
) -> Divergence:
    """Compare `model` with the model `base` on a text. Both evaluate it at the same time, and no
    base file is written; probabilities of the base are not rounded.

    Arguments as for `measure_divergence` and `measure_perplexity`. EvaluationError if the models
    make different tokens of the text.
    """
    refuse_peers(model, "predictions are compared")
    _warn_of_sizes(base.n_vocab, model, "the base model has")
    cut = Chunks.of_text(model, text, n_ctx, chunks)
    other = Chunks.of_text(base, text, n_ctx, chunks)
    if not np.array_equal(cut.tokens, other.tokens):
        raise EvaluationError(
            f"makes other tokens of the text than {base.source.path}", file=model.source.path
        )
    statistics, clock = Statistics(), Clock(cut, progress)
    both = zip(
        cut.scored_logits(model, batch_tokens), other.scored_logits(base, batch_tokens), strict=True
    )
    for (chunk, logits), (_, of_base) in both:
        found = compare_all(
            logits, log_softmax(of_base), of_base.argmax(dim=1).cpu().numpy(), cut.targets(chunk)
        )
        check_finite(found.nll, model, chunk)
        check_finite(found.nll_base, base, chunk)
        statistics.add(found)
        if on_chunk is not None:
            on_chunk(chunk, statistics)
        clock.report(chunk, statistics.ppl[0])
    return Divergence(statistics, len(cut), n_ctx, clock.seconds)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """float32[rows, vocab] of logits, summed as for perplexity."""
    top, lse = log_sum_exp(logits)
    return logits - (top.double() + lse).float()[:, None]


def _warn_of_sizes(n_vocab: int, model: Model, what: str) -> None:
    if n_vocab != model.n_vocab:
        log.warning("%s a vocabulary of %d, the model one of %d", what, n_vocab, model.n_vocab)


def _error(moments: Moments) -> float:
    return moments.error if moments.n > _FEW else 0.0

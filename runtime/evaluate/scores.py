"""Negative log-likelihoods of targets, and means with their standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_ROWS = 64  # rows of logits worked on at once, to bound memory for large vocabularies


def row_slices(n_rows: int) -> list[slice]:
    """Return slices of at most _ROWS rows that cover `n_rows` rows in order."""
    return [slice(start, min(start + _ROWS, n_rows)) for start in range(0, n_rows, _ROWS)]


def log_sum_exp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """max float32[rows] and ln(sum(exp(z - max))) float64[rows]: exponentials in float32, their sum
    in float64.
    """
    top = logits.max(dim=-1).values
    return top, (logits - top[:, None]).exp_().sum(dim=-1, dtype=torch.float64).log_()


def negative_log_likelihood(logits: torch.Tensor, targets: np.ndarray) -> np.ndarray:
    """float64[rows]: -ln softmax(logits)[target] for logits float32[rows, vocab]."""
    wanted = torch.from_numpy(targets).to(logits.device)
    parts = []
    for rows in row_slices(len(logits)):
        top, lse = log_sum_exp(logits[rows])
        z = logits[rows].gather(1, wanted[rows, None])[:, 0]
        parts.append(lse - (z.double() - top.double()))
    return torch.cat(parts).cpu().numpy()


LEAST_LOG_P = -16.0  # smaller base probabilities do not count towards the divergence


@dataclass(frozen=True)
class Compared:
    """How a model's predictions differ from a base's, a value per scored token: negative
    log-likelihoods of the model and of the base, divergence, and whether the same token is the most
    probable one.

    From a compact base the divergence is an estimate: `least` is what it is at least, `variance`
    that of the estimate. Otherwise both are None.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray
    least: np.ndarray | None = None
    variance: np.ndarray | None = None


def compare_all(
    logits: torch.Tensor, log_p: torch.Tensor, top_p: np.ndarray, targets: np.ndarray
) -> Compared:
    """Compare float32[rows, vocab] logits with log-probabilities of the base over its whole
    vocabulary; `top_p` has its most probable tokens. What both vocabularies have is compared.
    """
    n_common = min(logits.shape[1], log_p.shape[1])
    wanted = torch.from_numpy(targets).to(logits.device)
    nll, kld, top_q = [], [], []
    for rows in row_slices(len(logits)):
        z, log_p_rows = logits[rows], log_p[rows, :n_common].to(logits.device)
        top, lse = log_sum_exp(z)
        shift = (top.double() + lse)[:, None]
        nll.append((shift - z.gather(1, wanted[rows, None]))[:, 0])
        terms = log_p_rows.exp() * (log_p_rows - z[:, :n_common] + shift.float())
        kld.append(terms.masked_fill_(log_p_rows <= LEAST_LOG_P, 0).sum(dim=1, dtype=torch.float64))
        top_q.append(z.argmax(dim=1))
    nll, kld, top_q = (torch.cat(parts).cpu().numpy() for parts in (nll, kld, top_q))
    wanted = wanted.to(log_p.device)
    nll_base = -log_p.gather(1, wanted[:, None])[:, 0].double().cpu().numpy()
    return Compared(nll, nll_base, kld, top_q == top_p)


@dataclass
class Moments:
    """Running count, sum and sum of squares."""

    n: int = 0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add values, an array of any float type with one dimension, in float64."""
        values = values.astype(np.float64)
        self.n += len(values)
        self.sum += float(values.sum())
        self.squares += float(np.square(values).sum())

    @property
    def mean(self) -> float:
        """The mean. Raise ZeroDivisionError before any value is added."""
        return self.sum / self.n

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 where the variance is not positive."""
        variance = self.squares / self.n - self.mean**2
        return math.sqrt(variance / (self.n - 1)) if variance > 0 and self.n > 1 else 0.0


def exp_or_inf(x: float) -> float:
    """exp(x), infinity where a float64 cannot hold it."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf

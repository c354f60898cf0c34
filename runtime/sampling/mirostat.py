"""Mirostat (Basu et al., 2021): keep the surprise of the text near a target, by choosing how many
tokens, or how surprising ones, can be drawn.
"""

from __future__ import annotations

import numpy as np

from . import filters
from .filters import Candidates

_USED = 100  # tokens that version 1 estimates the distribution from


class Mirostat:
    """version: 1 or 2. tau: the target surprise in bits. eta: how fast `mu`, the largest surprise
    that is allowed, follows it.
    """

    def __init__(self, version: int, tau: float, eta: float):
        self.version, self.tau, self.eta = version, tau, eta
        self.mu = 2 * tau

    def truncate(self, c: Candidates) -> None:
        """Drop tokens that are too surprising. Those that are left are in order."""
        if self.version == 1:
            filters.top_k(c, max(self.count(c), 1))
            return
        likely = c.probabilities() >= 2.0**-self.mu
        if likely.any():
            c.take(likely)
            c.sort()
        else:
            filters.top_k(c, 1)

    def count(self, c: Candidates) -> int:
        """Return how many tokens have a surprise of about `mu` in all, if probabilities follow
        Zipf's law with the exponent that the first ones show.
        """
        probabilities = c.probabilities()
        n_used = min(_USED, len(c))
        largest = np.partition(probabilities, len(c) - n_used)[len(c) - n_used :]
        probabilities = np.maximum(np.sort(largest)[::-1], 1e-300)
        ranks = np.arange(1, len(probabilities))
        steps = np.log((ranks + 1) / ranks)
        falls = np.log(probabilities[:-1] / probabilities[1:])
        if not len(steps):
            return 1
        exponent = float((steps * falls).sum() / (steps * steps).sum())
        n, epsilon = len(c), exponent - 1
        with np.errstate(all="ignore"):
            if exponent == 0:
                return n
            scaled = epsilon * 2.0**self.mu / (1 - float(n) ** -epsilon) if epsilon else np.inf
            k = np.power(scaled, 1 / exponent)
        return n if not np.isfinite(k) or k >= n else int(k)

    def update(self, probability: float) -> None:
        """A token of this probability, among those that were left, has been drawn."""
        surprise = -np.log2(max(probability, 1e-300))
        self.mu -= self.eta * (surprise - self.tau)

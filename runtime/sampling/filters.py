"""Samplers without a state: each takes candidates, drops some or changes their logits.

The definitions are those of llama.cpp's samplers and of the papers they come from: top-p (Holtzman
et al., 2020), typical (Meister et al., 2023), min-p (Nguyen et al., 2024), top-n-sigma (Tang et
al., 2024), entropy-based dynamic temperature (Zhu et al., 2024). Everything is computed in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np


@cache
def _all_ids(n: int) -> np.ndarray:
    """Return 0 to n - 1, which nobody changes."""
    ids = np.arange(n, dtype=np.int64)
    ids.flags.writeable = False
    return ids


@dataclass
class Candidates:
    """Tokens that can still be drawn: ids int64[n] and logits float64[n].

    in_order: they descend, the lower id first among equals.
    """

    ids: np.ndarray
    logits: np.ndarray
    in_order: bool = False

    @classmethod
    def of(cls, logits: np.ndarray) -> Candidates:
        """Return all tokens of a vocabulary, float64[vocab], but those with a logit of -infinity.
        The array is theirs from now on.
        """
        ids = _all_ids(len(logits))
        if logits.min() == -np.inf:
            ids = np.flatnonzero(logits > -np.inf)
            logits = logits[ids]
        return cls(ids, logits)

    def __len__(self) -> int:
        return len(self.ids)

    def sort(self) -> None:
        """Bring them in order."""
        if self.in_order:
            return
        if len(self) > 1 and (np.diff(self.ids) < 0).any():
            self.take(np.argsort(self.ids))
        self.take(np.argsort(-self.logits, kind="stable"))
        self.in_order = True

    def take(self, kept: np.ndarray | slice) -> None:
        """Keep some of them: indices, a mask or a slice."""
        self.ids, self.logits = self.ids[kept], self.logits[kept]

    def probabilities(self) -> np.ndarray:
        """Return the softmax of the logits, in their order."""
        weights = np.exp(self.logits - self.logits.max())
        return weights / weights.sum()


def penalize(
    c: Candidates, history: Sequence[int], repeat: float, frequency: float, presence: float
) -> None:
    """Make tokens of `history` less probable: positive logits are divided by `repeat` and others
    multiplied, then `frequency` per occurrence and `presence` are subtracted.
    """
    if not len(history):
        return
    tokens, counts = np.unique(np.asarray(history, dtype=np.int64), return_counts=True)
    if c.in_order or len(c) < 1 or c.ids[-1] != len(c) - 1:
        where = {int(token): i for i, token in enumerate(c.ids)}
        found = [(where[int(t)], n) for t, n in zip(tokens, counts) if int(t) in where]
        places = np.array([place for place, _ in found], dtype=np.int64)
        counts = np.array([count for _, count in found], dtype=np.int64)
    else:  # the whole vocabulary
        known = tokens < len(c)
        places, counts = tokens[known], counts[known]
    old = c.logits[places]
    c.logits[places] = np.where(old > 0, old / repeat, old * repeat) - counts * frequency - presence
    c.in_order = False


def top_n_sigma(c: Candidates, n: float) -> None:
    """Keep tokens whose logits are at most n standard deviations below the best."""
    if n <= 0 or len(c) <= 1:
        return
    c.take(c.logits >= c.logits.max() - n * c.logits.std())


def top_k(c: Candidates, k: int) -> None:
    """Keep the k most probable tokens; 0 keeps all."""
    if 0 < k < len(c) and not c.in_order:
        least = np.partition(c.logits, len(c) - k)[len(c) - k]
        c.take(c.logits >= least)  # more, if several are equal
    c.sort()
    if 0 < k < len(c):
        c.take(slice(k))


def typical(c: Candidates, p: float) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, until they have more than
    probability p.
    """
    if p >= 1:
        return
    c.sort()
    probabilities = c.probabilities()
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    entropy = float((probabilities * surprise).sum())
    nearest = np.argsort(np.abs(surprise - entropy), kind="stable")
    reached = np.cumsum(probabilities[nearest]) > p
    n = 1 + int(np.argmax(reached)) if reached.any() else len(c)
    c.take(np.sort(nearest[:n]))


def top_p(c: Candidates, p: float) -> None:
    """Keep the fewest of the most probable tokens that have probability p in all."""
    if p >= 1:
        return
    c.sort()
    weights = np.exp(c.logits - c.logits[0])
    c.take(slice(1 + int((weights.cumsum() < p * weights.sum()).sum())))


def min_p(c: Candidates, p: float) -> None:
    """Keep tokens that are at least p times as probable as the best."""
    if p > 0 and len(c):
        c.take(np.exp(c.logits - c.logits.max()) >= p)


def xtc(c: Candidates, probability: float, threshold: float, chance: float) -> None:
    """With a `probability`, drop all tokens of at least probability `threshold` but the least
    probable of them. chance: a random number in [0, 1).
    """
    if probability <= 0 or threshold > 0.5 or len(c) < 2 or chance > probability:
        return
    c.sort()
    last = int((c.probabilities() >= threshold).sum()) - 1
    if last > 0:
        c.take(slice(last, None))


def temperature(c: Candidates, t: float, spread: float = 0.0, exponent: float = 1.0) -> None:
    """Divide logits by the temperature t; 0 keeps the best token only.

    spread: the temperature is t - spread where the model is certain, t + spread where all
    candidates are equally probable, and between by entropy to the power of `exponent`.
    """
    if spread > 0:
        if len(c) <= 1:
            return
        low, high = max(0.0, t - spread), t + spread
        probabilities = c.probabilities()
        entropy = -float((probabilities * np.log(np.maximum(probabilities, 1e-300))).sum())
        t = low + (high - low) * (entropy / np.log(len(c))) ** exponent
    if t <= 0:
        best = c.logits == c.logits.max()
        first = int(np.flatnonzero(best)[0]) if c.in_order else _lowest(c.ids, best)
        c.take(slice(first, first + 1))
    else:
        c.logits = c.logits / t


def _lowest(ids: np.ndarray, among: np.ndarray) -> int:
    """Return the index of the lowest id among those of a mask."""
    places = np.flatnonzero(among)
    return int(places[ids[places].argmin()])

"""From logits to the next token, in the order of the reference tools: top-k, top-p, min-p,
temperature, then one draw.

The draw is a pure function of seed and position (`uniform`), so that a run repeats, and so that a
GPU draws from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import EvaluationError, UsageError
from ...formats.arguments import number, whole_number

_MASK = 0xFFFFFFFF
# (logits, k) to what `candidates` returns; None if they are not finite, or it cannot tell.
Largest = Callable[[torch.Tensor, int], tuple[np.ndarray, np.ndarray] | None]


@dataclass(frozen=True)
class Sampling:
    """How a token is picked. UsageError for values outside of their range.

    temperature 0: the most probable token, the lowest id among equals; nothing else matters then.
    top_k: candidates are the k most probable tokens (0: all), in descending order, the lower id
    first among equals. top_p: of these the fewest whose probabilities, among the candidates, sum to
    at least top_p. min_p: and only those at least min_p times as probable as the best. The draw is
    among what is left, with logits divided by the temperature.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    def __post_init__(self):
        for name in ("top_k", "seed"):
            whole_number(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p"):
            number(name, getattr(self, name))
        for name, value, fits, expected in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2^64 - 1"),
        ):
            if not fits:
                raise UsageError(f"{name} is {value}, expected {expected}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


GREEDY = Sampling(temperature=0)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011): four 32-bit words that look random, from a counter and a
    key.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & _MASK, p0 >> 32 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits: the first word of Philox4x32-10 with counter (position, 0,
    0, 0), key (seed's low, high word).

    `position` is that of the token to be drawn: the number of tokens before it in its sequence.
    """
    word = philox((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))[0]
    return (word >> 8) * 2.0**-24


def sample(
    logits: torch.Tensor, sampling: Sampling, position: int, largest: Largest | None = None
) -> int:
    """The id of the token at `position`, for logits float32[vocab] of the position before.
    EvaluationError if they are not finite. largest: a faster way to find candidates.
    """
    k = 1 if sampling.is_greedy else sampling.top_k
    found = None if largest is None else largest(logits, k)
    if found is None:
        if not torch.isfinite(logits).all():
            raise EvaluationError(f"the model's predictions for position {position} are not finite")
        found = candidates(logits, k)
    values, ids = found
    if sampling.is_greedy:
        return int(ids[0])
    # These are few numbers, for which numpy takes a fraction of torch's time.
    relative = (values - values[0]).astype(np.float64)
    probabilities = np.exp(relative)
    kept = (
        1 + np.count_nonzero(probabilities.cumsum() < sampling.top_p * probabilities.sum())
        if sampling.top_p < 1
        else len(ids)
    )
    # Relative to the best: they descend.
    kept = min(kept, np.count_nonzero(probabilities >= sampling.min_p))
    weights = np.exp(relative[:kept] / sampling.temperature).cumsum()
    drawn = np.count_nonzero(weights <= uniform(sampling.seed, position) * weights[-1])
    return int(ids[min(drawn, kept - 1)])


def candidates(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of logits float32[n_vocab] (all for 0) and their ids, on the CPU: descending,
    the lower id first among equals.
    """
    if 0 < k < len(logits):
        # topk says nothing about the order of equals, so it only tells the smallest value that
        # counts.
        found = np.flatnonzero((logits >= logits.topk(k).values[-1]).cpu().numpy())
    else:
        k, found = len(logits), np.arange(len(logits))
    values = logits.cpu().numpy()[found]
    order = np.argsort(-values, kind="stable")[:k]
    return values[order], found[order]

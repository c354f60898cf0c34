"""DRY, "don't repeat yourself": tokens that would continue a repetition become less probable, the
more the longer it already is.

A token that followed an earlier copy of the last L tokens loses multiplier * base^(L - allowed), if
L is at least `allowed`. Repetitions do not reach across breakers, such as a line break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from .filters import Candidates

_LARGEST = 88.7228391  # the logarithm of the largest float32
_SCANNED = 32  # tokens whose text is searched for breakers at a time


class Dry:
    """token_bytes: returns the text of a token."""

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed: int,
        breakers: Sequence[str],
        token_bytes: Callable[[int], bytes],
    ):
        self.multiplier, self.base, self.allowed = multiplier, base, allowed
        self.breakers = [text.encode() for text in breakers if text]
        self._bytes = cache(token_bytes)

    def __call__(self, c: Candidates, history: Sequence[int]) -> None:
        """Penalize candidates that continue repetitions in `history`."""
        penalties = self.penalties(history)
        if not penalties:
            return
        tokens = np.array(sorted(penalties), dtype=np.int64)
        values = np.array([penalties[int(token)] for token in tokens])
        at = np.searchsorted(tokens, c.ids)
        at[at == len(tokens)] = 0
        hit = tokens[at] == c.ids
        c.logits = np.where(hit, c.logits - values[at], c.logits)
        c.in_order = False

    def penalties(self, history: Sequence[int]) -> dict[int, float]:
        """Return token to what is subtracted from its logit."""
        found = {}
        most = _LARGEST / np.log(self.base) if self.base > 1.000001 else np.inf
        for token, length in self.repetitions(history).items():
            if length >= self.allowed and not self.breaks(token):
                exponent = min(length - self.allowed, most)
                found[token] = self.multiplier * self.base**exponent
        return found

    def repetitions(self, history: Sequence[int]) -> dict[int, int]:
        """Return token to the most last tokens of `history` that it followed before."""
        n, limit = len(history), self.since_breaker(history)
        if n <= self.allowed or limit < max(self.allowed, 1):
            return {}
        tokens = np.asarray(history, dtype=np.int64)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of earlier copies
        longest: dict[int, int] = {}
        length = 1
        while len(ends):
            for token in np.unique(tokens[ends + 1]):
                longest[int(token)] = length
            if length >= limit:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
            length += 1
        return longest

    def since_breaker(self, history: Sequence[int]) -> int:
        """Return how many tokens follow the last one in which a breaker ends."""
        longest = max(map(len, self.breakers), default=0)
        if not longest:
            return len(history)
        text, ends = b"", []  # ends: of each token in `text`, the last token first
        stop = len(history)
        while stop > 0:
            start = max(0, stop - _SCANNED)
            pieces = [self._bytes(token) for token in history[start:stop]]
            text = b"".join(pieces) + text
            ends = [len(piece) for piece in pieces] + ends
            stop = start
            last = max(
                (text.rfind(one) + len(one) for one in self.breakers if one in text), default=0
            )
            if last:
                total = np.cumsum(ends)
                return int((total > last).sum()) - (0 if last in total else 1)
        return len(history)

    def breaks(self, token: int) -> bool:
        """Return whether a breaker is in the text of a token."""
        return any(one in self._bytes(token) for one in self.breakers)

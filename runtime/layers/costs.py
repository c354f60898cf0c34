"""What mixers compute and read at least, beyond weight matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..state.cache import CacheSettings


class LooksBack(ABC):
    """A mixer whose tokens look at the positions before them: what it costs follows from their
    number.
    """

    window: int
    pair_flop: float

    @abstractmethod
    def state_bytes(self, capacity: int, settings: CacheSettings) -> int:
        """Return the bytes that a sequence of at most `capacity` tokens keeps."""

    def flop(self, n_past: int, n: int) -> float:
        """Return the operations for n tokens after n_past others."""
        return self.pair_flop * pairs(n_past, n, self.window)

    def read_bytes(self, n_past: int, n: int, settings: CacheSettings) -> float:
        """Return the bytes of state that n tokens read one by one, after n_past others."""
        return self.state_bytes(1, settings) * pairs(n_past, n, self.window)


def pairs(n_past: int, n: int, most: int = 0) -> int:
    """Return the pairs of one of n tokens after n_past others and a position it sees, itself
    included; at most `most` for each token (0: all).
    """
    if not most or n_past + n <= most:
        return n * n_past + n * (n + 1) // 2
    below = max(0, most - n_past)  # tokens that see fewer
    return pairs(n_past, below) + (n - below) * most

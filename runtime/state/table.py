"""Where the positions of a sequence are in memory: a table of blocks of a pool."""

from __future__ import annotations

import heapq

import torch

from ...errors import ShapeError, UsageError

BLOCK_TOKENS = 64  # positions in a block


class Blocks:
    """The blocks of a pool that are free. The lowest one is taken first."""

    def __init__(self, n_blocks: int):
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a free block. UsageError if there is none."""
        if not self._free:
            raise UsageError(
                f"all {self.n_blocks * BLOCK_TOKENS} positions of the cache are in use: end a"
                " sequence or make a larger cache"
            )
        return heapq.heappop(self._free)

    def give(self, block: int) -> None:
        """Make a block free again."""
        heapq.heappush(self._free, block)


class Table:
    """The blocks of one sequence: block i of the sequence, positions i * BLOCK_TOKENS and on, is
    `blocks[i]` of the pool; -1 once it is released.

    window: only so many positions before the next one are kept; 0 keeps all.
    """

    def __init__(self, pool: Blocks, capacity: int, window: int = 0):
        self.pool, self.capacity, self.window = pool, capacity, window
        self.blocks: list[int] = []
        self._known: tuple[tuple[int, int], slice | torch.Tensor] | None = None

    @classmethod
    def whole(cls, capacity: int) -> Table:
        """A table of all blocks of an own pool, in order."""
        table = cls(Blocks(-(-capacity // BLOCK_TOKENS)), capacity)
        table.reserve(capacity)
        return table

    @property
    def first_kept(self) -> int:
        """The first position from which on all are kept."""
        released = [i for i, block in enumerate(self.blocks) if block < 0]
        return (released[-1] + 1) * BLOCK_TOKENS if released else 0

    def first_needed(self, n_past: int) -> int:
        """The first position that a token after `n_past` others can see."""
        return max(0, n_past - self.window + 1) if self.window else 0

    def reserve(self, n: int) -> None:
        """Take blocks for the first `n` positions. ShapeError for more than the sequence may have,
        UsageError if the pool has no more.
        """
        if n > self.capacity:
            raise ShapeError(f"{n} tokens do not fit a sequence of at most {self.capacity}")
        while len(self.blocks) * BLOCK_TOKENS < n:
            self.blocks.append(self.pool.take())
            self._known = None

    def release_unseen(self, n_past: int) -> None:
        """Give back blocks that no token after `n_past` others can see."""
        for i in range(min(self.first_needed(n_past) // BLOCK_TOKENS, len(self.blocks))):
            self._release(i)

    def truncate(self, n: int) -> None:
        """Give back blocks after the first `n` positions. All of them are kept if the table has
        the whole pool, whose order then stays as it is.
        """
        if self.pool.n_blocks == len(self.blocks) and not self.window:
            return
        while len(self.blocks) > -(-n // BLOCK_TOKENS):
            self._release(len(self.blocks) - 1)
            self.blocks.pop()

    def restart(self, n: int) -> None:
        """Give back all blocks, and take those that a token after `n` others can see."""
        for i in range(len(self.blocks)):
            self._release(i)
        self.blocks = [-1] * (self.first_needed(n) // BLOCK_TOKENS)
        self._known = None
        self.reserve(n)

    def _release(self, i: int) -> None:
        if self.blocks[i] >= 0:
            self.pool.give(self.blocks[i])
            self.blocks[i] = -1
            self._known = None

    def rows(self, first: int, stop: int) -> slice | torch.Tensor:
        """Rows of the pool's memory of positions first..stop, as a slice if they follow each other,
        else int64[stop - first]. ShapeError for positions that are not kept.
        """
        if self._known is not None and self._known[0] == (first, stop):
            return self._known[1]
        blocks = self.blocks[first // BLOCK_TOKENS : -(-stop // BLOCK_TOKENS)]
        if len(blocks) * BLOCK_TOKENS < stop - first // BLOCK_TOKENS * BLOCK_TOKENS or -1 in blocks:
            raise ShapeError(
                f"positions {first} to {stop - 1} are not in a cache for {self.capacity} tokens"
            )
        skipped = first % BLOCK_TOKENS
        if all(b == blocks[0] + i for i, b in enumerate(blocks)):
            start = blocks[0] * BLOCK_TOKENS + skipped if blocks else 0
            rows: slice | torch.Tensor = slice(start, start + stop - first)
        else:
            starts = torch.tensor(blocks)[:, None] * BLOCK_TOKENS
            rows = (starts + torch.arange(BLOCK_TOKENS)).flatten()[skipped:][: stop - first]
        self._known = (first, stop), rows
        return rows

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
        """Blocks that no sequence has."""
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
        self._n_released = 0  # blocks before this one are released
        self._reserved = False
        self._run: slice | None = None
        self._known: tuple[tuple[int, int], slice | torch.Tensor] | None = None

    @classmethod
    def alone(cls, capacity: int) -> Table:
        """Return a reserved table of a new pool."""
        table = cls(Blocks(-(-capacity // BLOCK_TOKENS)), capacity)
        table.reserve_all()
        return table

    @property
    def run(self) -> slice | None:
        """The rows of all positions of a reserved table, if they follow each other; they stay the
        same until `end`. None for other tables.
        """
        return self._run

    @property
    def first_kept(self) -> int:
        """The first position from which on all are kept."""
        return self._n_released * BLOCK_TOKENS

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

    def reserve_all(self) -> None:
        """Take blocks for the whole capacity and keep them until `end`. UsageError if the pool has
        no more.
        """
        self.reserve(self.capacity)
        self._reserved = True
        first = self.blocks[0] if self.blocks else 0
        if self.blocks == list(range(first, first + len(self.blocks))):
            self._run = slice(first * BLOCK_TOKENS, first * BLOCK_TOKENS + self.capacity)

    def release_unseen(self, n_past: int) -> None:
        """Give back blocks that no token after `n_past` others can see."""
        stop = min(self.first_needed(n_past) // BLOCK_TOKENS, len(self.blocks))
        for i in range(self._n_released, stop):
            self._release(i)
            self._n_released = i + 1

    def truncate(self, n: int) -> None:
        """Give back blocks after the first `n` positions, unless the table is reserved."""
        if self._reserved:
            return
        while len(self.blocks) > -(-n // BLOCK_TOKENS):
            self._release(len(self.blocks) - 1)
            self.blocks.pop()
        self._n_released = min(self._n_released, len(self.blocks))

    def restart(self, n: int) -> None:
        """Give back all blocks, and take those that a token after `n` others can see."""
        self.end()
        self._n_released = self.first_needed(n) // BLOCK_TOKENS
        self.blocks = [-1] * self._n_released
        self.reserve(n)

    def end(self) -> None:
        """Give back all blocks."""
        self._reserved, self._run, self._known = False, None, None
        self.truncate(0)

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
        if first < self.first_kept or stop > len(self.blocks) * BLOCK_TOKENS:
            raise ShapeError(
                f"positions {first} to {stop - 1} are not in a cache for {self.capacity} tokens"
            )
        if self._run is not None:
            return slice(self._run.start + first, self._run.start + stop)
        blocks = self.blocks[first // BLOCK_TOKENS : -(-stop // BLOCK_TOKENS)]
        skipped = first % BLOCK_TOKENS
        if all(b == blocks[0] + i for i, b in enumerate(blocks)):
            start = blocks[0] * BLOCK_TOKENS + skipped if blocks else 0
            rows: slice | torch.Tensor = slice(start, start + stop - first)
        else:
            starts = torch.tensor(blocks)[:, None] * BLOCK_TOKENS
            rows = (starts + torch.arange(BLOCK_TOKENS)).flatten()[skipped:][: stop - first]
        self._known = (first, stop), rows
        return rows

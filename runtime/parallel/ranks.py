"""Which rank this process is: from the environment that torchrun, or `launch`, gives it. Imports
nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...errors import UsageError

STORE_SOCKET = "IQFORGE_STORE_SOCKET"  # of rank 0: the socket on which it waits for the others
LAUNCHED = "IQFORGE_LAUNCHED"


def named_ranks(ranks: Iterable[int | str]) -> str:
    """Return `rank 0, rank 1 and rank 2` for the numbers of ranks, at least one."""
    *first, last = (f"rank {rank}" for rank in ranks)
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class Ranks:
    """This process is rank `rank` of `size`, and number `local_rank` of `local_size` on its host.

    launched: `launch` has started it, on this host alone. port: of the meeting point.
    store_socket: a file descriptor, for rank 0 of such a start.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int = 0
    launched: bool = False
    store_socket: int | None = None

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Ranks | None:
        """Return the rank of this process; None if it is alone. UsageError for an environment that
        contradicts itself.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        numbers = {}
        for name, default in (
            ("RANK", None),
            ("WORLD_SIZE", None),
            ("LOCAL_RANK", environment["RANK"]),
            ("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]),
            ("MASTER_PORT", "0"),
        ):
            text = environment.get(name, default) or ""
            if not text.isdecimal():
                raise UsageError(f"the environment's {name} is '{text[:40]}', expected a number")
            numbers[name] = int(text)
        rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
        local_rank, local_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
        if not rank < size or not local_rank < local_size <= size:
            raise UsageError(
                f"the environment says rank {rank} of {size}, {local_rank} of {local_size} here"
            )
        descriptor = environment.get(STORE_SOCKET)
        return cls(
            rank,
            size,
            local_rank,
            local_size,
            numbers["MASTER_PORT"],
            LAUNCHED in environment,
            int(descriptor) if descriptor else None,
        )

"""Passes over windows of a text, dealt out in turn to ranks that each have the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ..parallel.alike import check_alike, digest_of
from ..parallel.share import Peers

Pass = TypeVar("Pass")
Found = TypeVar("Found")


def in_turns(
    passes: Iterable[Pass], evaluate: Callable[[Pass], Found], peers: Peers | None
) -> Iterator[tuple[Pass, Found]]:
    """Yield every pass with what `evaluate` returns for it, in order, on all ranks.

    With `peers`, each rank evaluates one pass of a round, and all get the results of the round.
    What is computed of them in this order does not depend on the number of ranks. UsageError if
    ranks have other passes.
    """
    if peers is None:
        for one in passes:
            yield one, evaluate(one)
        return
    waiting = list(passes)
    check_alike(peers, {"order of passes (-b)": digest_of(repr(waiting).encode())})
    for start in range(0, len(waiting), peers.size):
        round_ = waiting[start : start + peers.size]
        own = evaluate(round_[peers.rank]) if peers.rank < len(round_) else None
        yield from zip(round_, peers.exchange(own)[: len(round_)], strict=True)

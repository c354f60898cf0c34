"""Run work on threads and take the results in order, so that nothing depends on the number of
threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Label = TypeVar("Label")
Result = TypeVar("Result")


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(asked: int) -> int:
    """Return the number of threads to start: `asked`, but at most four per core, as more would only
    cost memory; one per core for 0 or less.
    """
    return min(asked, 4 * default_threads()) if asked > 0 else default_threads()


def results_in_order(
    pool: Executor, ahead: int, works: Iterator[tuple[Label, Callable[[], Result]]]
) -> Generator[tuple[Label, Result], None, None]:
    """Yield (label, result) of every (label, function), in their order. At most `ahead` of them are
    under way or waiting to be taken.

    What a function raises is raised here. Close the iterator (contextlib.closing) to drop functions
    that have not started.
    """
    waiting: deque[tuple[Label, Future[Result]]] = deque()
    try:
        for label, function in works:
            waiting.append((label, pool.submit(function)))
            if len(waiting) >= ahead:
                label, future = waiting.popleft()
                yield label, future.result()
        while waiting:
            label, future = waiting.popleft()
            yield label, future.result()
    finally:
        for _, future in waiting:
            future.cancel()

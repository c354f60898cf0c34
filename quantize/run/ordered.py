"""Work on threads whose results are taken in order, so that what is made of them does not depend on
the number of threads.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Label, Result = TypeVar("Label"), TypeVar("Result")


def in_order(
    pool: Executor, ahead: int, works: Iterator[tuple[Label, Callable[[], Result]]]
) -> Iterator[tuple[Label, Result]]:
    """(label, result) of every (label, function), in their order; at most `ahead` of them under way
    or waiting to be taken.

    What a function raises is raised here. Close it (contextlib.closing): what has not begun then is
    not begun any more.
    """
    waiting: deque[tuple[Label, Future]] = deque()
    try:
        for work in itertools.chain(works, itertools.repeat(None)):
            if work is not None:
                waiting.append((work[0], pool.submit(work[1])))
            elif not waiting:
                return
            if work is None or len(waiting) >= ahead:
                label, future = waiting.popleft()
                yield label, future.result()
    finally:
        for _, future in waiting:
            future.cancel()

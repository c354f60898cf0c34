"""Check what every hostile file must lead to: a named error at once, without allocating what the
file only claims to hold.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import pytest
from iqforge.errors import IqforgeError
from iqforge.formats.gguf.reader import open_gguf

T = TypeVar("T")
MAX_SECONDS, MAX_BYTES = 0.1, 50 << 20


def quickly(attempt: Callable[[], T], seconds: float) -> T:
    """Return `attempt()`, and check that it takes less time. That is the best of three, of this
    thread: other processes take time as well, and the first call may import.
    """
    times = []
    for _ in range(3):
        start = time.thread_time()
        found = attempt()
        times.append(time.thread_time() - start)
        if times[-1] < seconds:
            return found
    raise AssertionError(f"took {min(times):.3f} s, expected less than {seconds} s")


def refused(path, error: type[IqforgeError], *words: str) -> IqforgeError:
    """Check that opening `path` raises `error` with `words` in its message, and the limits of time
    and memory.
    """

    def attempt() -> pytest.ExceptionInfo:
        with pytest.raises(error) as caught:
            open_gguf(path)
        return caught

    caught = quickly(attempt, MAX_SECONDS)
    tracemalloc.start()
    with pytest.raises(error):
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert os.fspath(path) in message and "\n" not in message and "\x1b" not in message
    for word in words:
        assert word in message
    assert peak < MAX_BYTES
    return caught.value


def refuser(path):
    """Return a function of bytes, expected error class and words of the message, which checks that
    a file of these bytes at `path` is refused.
    """

    def check(content: bytes, error: type[IqforgeError], *words: str) -> IqforgeError:
        path.write_bytes(content)
        return refused(path, error, *words)

    return check

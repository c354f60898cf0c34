"""Keep the lines that torch's profiler writes past Python's streams off the terminal."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# As in "USDT:2026-01-01 10:00:00 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start"
_LOGGED = re.compile(rb"(?:\[W|[A-Z]+:)\d{4}-?\d\d[^\n]*\.cpp:\d+\][^\n]*\n?")


@contextmanager
def without_log_lines() -> Iterator[None]:
    """Hold back the process's standard error within this context; what is not a line of the
    profiler's log is written when it ends.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            if rest := _LOGGED.sub(b"", held.read()):
                os.write(2, rest)

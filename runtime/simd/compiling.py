"""Compiling several functions at once.

numba holds one lock for all threads of a process, so compiling two functions at once takes two
processes. They are forks of this one where that is safe, and fill the cache on disk, from which
this process loads the code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...formats.kernel import is_cached

MOST_PROCESSES = 6
LEAST_EACH = 3  # functions for a process: a fork takes as long as half of one
PATIENCE = 30.0  # seconds for the processes after this one is done


def is_on_disk(function: Callable, signature: Any) -> bool:
    """Return whether the code that `formats.kernel.compiled_callback` makes is on disk. Also true
    where numba finds no folder for it: it is then compiled, or read from a private folder, when it
    is needed.
    """
    from numba.core import ccallback, sigutils

    base: Any = ccallback.CFunc
    found = base(
        function,
        sigutils.normalize_signature(signature),
        locals={},
        options={"error_model": "numpy"},
    )
    try:
        found.enable_caching()
    except RuntimeError:
        return True
    return is_cached(found._cache, found._sig, found._targetdescr.target_context)


def in_processes(tasks: Sequence[Callable[[], object]]) -> None:
    """Do all tasks, in this process and in others that take the next one as they can. Some may be
    done in another process alone.
    """
    children = min(_processors(), MOST_PROCESSES, len(tasks) // LEAST_EACH) - 1
    with _without_collection():
        if children < 1 or not _forks():
            for task in tasks:
                task()
        else:
            _in_forks(tasks, children)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _forks() -> bool:
    """Return whether a fork of a process with threads may go on: only with glibc's promises."""
    return sys.platform == "linux"


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Let no garbage be collected: a compiler makes many objects, of which few form circles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in_forks(tasks: Sequence[Callable[[], object]], children: int) -> None:
    # Numbers of tasks are bytes in a pipe, of which everybody reads one at a time.
    ours, theirs = os.pipe()
    os.write(theirs, bytes(range(min(len(tasks), 256))))
    os.close(theirs)
    found = [_forked(tasks, ours) for _ in range(children)]
    try:
        _work(tasks, ours)
        for task in tasks[256:]:
            task()
    finally:
        os.close(ours)
        _wait_for(found)


def _forked(tasks: Sequence[Callable[[], object]], numbers: int) -> int:
    """Start a process that does tasks. Return its id."""
    with warnings.catch_warnings():
        # Python warns of threads, as locks that they hold stay held. Compiling needs none of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            _work(tasks, numbers)
            status = 0
        finally:
            os._exit(status)
    return child


def _work(tasks: Sequence[Callable[[], object]], numbers: int) -> None:
    while number := os.read(numbers, 1):
        tasks[number[0]]()


def _wait_for(children: Sequence[int]) -> None:
    """Wait until processes have ended; end those that do not."""
    stop = time.monotonic() + PATIENCE
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > stop:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.005)

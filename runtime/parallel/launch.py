"""Start one process per rank on this host, and end all of them when one fails.

Rank 0 has the terminal; what the others print is shown if they fail. Imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from .ranks import LAUNCHED, STORE_SOCKET

_PATIENCE = 2.0  # seconds between asking a process to end and ending it
_POLL = 0.02  # seconds
_SAME_TIME = 1.0  # seconds
_SHOWN = 4000  # last characters of what a failed rank printed
_PR_SET_PDEATHSIG = 1


@dataclass
class _Started:
    rank: int
    process: subprocess.Popen
    errors: IO[bytes] | None  # None for rank 0, whose errors are shown at once

    def message(self) -> str:
        """Return the end of what the rank printed to stderr."""
        if self.errors is None:
            return ""
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - _SHOWN))
        return self.errors.read().decode(errors="replace").strip()


def run_ranks(
    command: Sequence[str],
    n_ranks: int,
    environment: Mapping[str, str] | None = None,
    *,
    interactive: bool = False,
) -> int:
    """Run `command` as `n_ranks` processes, and return its exit status: that of the first rank that
    failed, 0 if none did. environment: more variables for all of them. interactive: rank 0 alone
    decides what Ctrl-C does.

    The ranks find each other through a socket on the loopback interface, which only they and this
    process hold. If this process dies, they do as well.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(max(64, n_ranks))
    started: list[_Started] = []
    asked = signal.signal(signal.SIGTERM, _interrupt)
    pressed = signal.getsignal(signal.SIGINT)
    if interactive:
        signal.signal(signal.SIGINT, _disregard)
    try:
        for rank in range(n_ranks):
            deaf = interactive and rank > 0
            started.append(_start(command, rank, n_ranks, listening, environment or {}, deaf))
        listening.close()
        return _watch(started)
    finally:
        _end([one.process for one in started])
        signal.signal(signal.SIGTERM, asked)
        if interactive:
            signal.signal(signal.SIGINT, pressed)
        listening.close()
        for one in started:
            if one.errors is not None:
                one.errors.close()


def _interrupt(number: int, frame: object) -> None:
    """End the ranks, once: `timeout` sends its signal to the process and then to its group."""
    signal.signal(signal.SIGTERM, _disregard)
    raise KeyboardInterrupt


def _disregard(number: int, frame: object) -> None:
    """Do nothing. Processes that are started do not inherit that, as they would SIG_IGN."""


def _start(
    command: Sequence[str],
    rank: int,
    n_ranks: int,
    listening: socket.socket,
    more: Mapping[str, str],
    deaf: bool,
) -> _Started:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
        LAUNCHED: "1",
    }
    # Several processes share the cores of the host.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // n_ranks)))
    environment.pop(STORE_SOCKET, None)
    kept: tuple[int, ...] = ()
    if rank == 0:
        kept = (listening.fileno(),)
        environment[STORE_SOCKET] = str(listening.fileno())
    # Closed by `run_ranks`.
    errors = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        list(command),
        env=environment | dict(more),
        stdin=None if rank == 0 else subprocess.DEVNULL,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=errors,
        pass_fds=kept,
        preexec_fn=functools.partial(_prepare, os.getpid(), deaf),
    )
    return _Started(rank, process, errors)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _prepare(parent: int, deaf: bool) -> None:
    """Run in a new process: Linux ends it when the process that started it, `parent`, ends. deaf:
    Ctrl-C does nothing to it.
    """
    if deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _watch(started: Sequence[_Started]) -> int:
    """Wait until all ranks have ended or one has failed."""
    while True:
        running = 0
        for one in started:
            status = one.process.poll()
            if status is None:
                running += 1
            elif status:
                return _failed(_culprit(one, started[0]), len(started))
        if not running:
            return 0
        time.sleep(_POLL)


def _culprit(failed: _Started, first: _Started) -> _Started:
    """Return rank 0 if it fails at the same time: then all ranks have the same reason, such as a
    wrong flag, and rank 0 has said it. A rank that has lost another one waits longer before it
    says so.
    """
    try:
        status = first.process.wait(_SAME_TIME)
    except subprocess.TimeoutExpired:
        return failed
    return first if status > 0 else failed


def _failed(one: _Started, n_ranks: int) -> int:
    """Say on stderr why a rank has ended, and return the exit status."""
    status = one.process.wait()
    if status < 0:
        name = signal.Signals(-status).name if -status in list(signal.Signals) else str(-status)
        # Nobody says so where the system ends a process for lack of memory.
        why = ", which the system sends when memory runs out" if status == -signal.SIGKILL else ""
        print(f"rank {one.rank} of {n_ranks} was ended by {name}{why}", file=sys.stderr)
        status = 128 - status
    elif one.rank:
        print(f"rank {one.rank} of {n_ranks} has failed:", file=sys.stderr)
    if message := one.message():
        print(message, file=sys.stderr)
    sys.stderr.flush()
    return status


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes that still run."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # one that was stopped ends only if it goes on
    limit = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

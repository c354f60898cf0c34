"""Ports of the loopback interface for servers that tests start."""

from __future__ import annotations

import random
import socket

_CHOSEN = random.SystemRandom()


def free_port() -> int:
    """Return a port that nobody listens to. The system gives no such port to a connection: it takes
    them from 32768 on, so that none is in use between this call and the start of a server.
    """
    while True:
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", _CHOSEN.randrange(10_000, 32_768)))
            except OSError:
                continue
            return found.getsockname()[1]

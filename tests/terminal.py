"""A dialogue in a pseudo terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal


class Terminal:
    """A dialogue in a pseudo terminal."""

    def __init__(self, *words: str):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "iqforge", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 240) -> str:
        """Read until the pattern, and return what came."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            ready, _, _ = select.select(
                [self.master], [], [], max(0.0, deadline - time.monotonic())
            )
            try:
                data = os.read(self.master, 4096) if ready else b""
            except OSError:
                data = b""
            assert data, f"{pattern!r} did not come: {self.seen!r}"
            self.seen += data.decode("utf-8", "replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_until_it_reads(self) -> None:
        """Wait until all threads have slept for half a second without any work in between."""
        limit, quiet, before = time.monotonic() + 240, 0, ""
        while quiet < 10:
            assert time.monotonic() < limit
            time.sleep(0.05)
            folders = Path(f"/proc/{self.process.pid}/task").iterdir()
            stats = [(folder / "stat").read_text().rpartition(")")[2].split() for folder in folders]
            now = str([one[11:13] for one in stats])  # user and system time
            quiet = quiet + 1 if now == before and {one[0] for one in stats} == {"S"} else 0
            before = now

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

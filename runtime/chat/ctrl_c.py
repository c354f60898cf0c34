"""Ctrl-C during a conversation."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class CtrlC:
    """Ctrl-C while a conversation runs: `pressed` says so, and only the second one until `clear` is
    a KeyboardInterrupt. Within `usual` each one is. Nothing is changed in another thread than the
    main one, which gets no signals.
    """

    def __init__(self):
        self._event = threading.Event()
        self._is_main = threading.current_thread() is threading.main_thread()

    def pressed(self) -> bool:
        """Whether Ctrl-C was pressed since the last `clear`."""
        return self._event.is_set()

    def clear(self) -> None:
        """Forget that Ctrl-C was pressed."""
        self._event.clear()

    def __enter__(self) -> CtrlC:
        self._before = signal.getsignal(signal.SIGINT)
        self._set(self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._set(self._before)

    @contextmanager
    def usual(self) -> Iterator[None]:
        """Let Ctrl-C interrupt within this context, where nothing can be left half done."""
        self._set(signal.default_int_handler)
        try:
            yield
        finally:
            self._set(self._handle)

    def _set(self, handler: Any) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()


def typed_so_far() -> str | None:
    """Return the line that Ctrl-C has just interrupted. None if that is not known, as without the
    module readline the terminal drops it.
    """
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline and sys.stdout.isatty() else None

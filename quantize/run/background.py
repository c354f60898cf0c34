"""Write on a separate thread, in order, so that nothing waits when the disk pauses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

MAX_BYTES = 32 << 20


class BackgroundWriter:
    """A queue of calls that hold at most `max_bytes` of data, or a single call that holds more.

    As a context manager it waits for all calls on exit. The first exception of a call is raised
    there or by the next `put`, and the calls after that one are dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes, self._waiting_bytes, self._closed = max_bytes, 0, False
        self._calls: deque[tuple[int, Callable[[], object]]] = deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="writing", daemon=True)
        self._thread.start()

    def put(self, n_bytes: int, call: Callable[[], object]) -> None:
        """Queue a call that holds `n_bytes` of data. Waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._fits(n_bytes))
            self._raise()
            self._calls.append((n_bytes, call))
            self._waiting_bytes += n_bytes
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all calls so far are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._calls)
            self._raise()

    def _fits(self, n_bytes: int) -> bool:
        return not self._calls or self._waiting_bytes + n_bytes <= self.max_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                n_bytes, call = self._calls[0]
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                self._error = error
            del call
            with self._changed:
                self._calls.popleft()
                self._waiting_bytes -= n_bytes
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

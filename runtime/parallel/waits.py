"""Which ranks wait for others: each says so while it waits, so that one that has waited too long
knows at once for whom.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_SOON = 1.0  # seconds after which a rank says that it waits
_GRACE = 3.0  # seconds in which others notice that a rank is lost
_ANSWER = 1.0  # seconds in which the store answers


class Waits:
    """The waits of rank `rank` of `size`, each at most `timeout` seconds. They are kept in `store`,
    which all ranks share: rank 0 has it, or what has started the ranks. Close it to end its thread.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float):
        self._store, self._rank, self._size = store, rank, size
        self._soon = min(_SOON, timeout / 4)
        self._calls = 0
        self._begun: float | None = None  # when the call that is under way has begun
        self._closed = threading.Event()
        self._telling = threading.Thread(target=self._tell, daemon=True)
        self._telling.start()

    def begin(self) -> None:
        """Note that a call begins in which this rank may wait."""
        self._calls += 1
        self._begun = time.monotonic()

    def end(self) -> None:
        """Note that the call has ended."""
        self._begun = None

    @property
    def seconds(self) -> float:
        """How long the call that is under way has taken; 0 if there is none."""
        begun = self._begun
        return 0.0 if begun is None else time.monotonic() - begun

    def missing(self, *, lost: bool) -> list[str]:
        """Return the other ranks that do not say that they wait. From now on this rank says so for
        good: it is about to end, and is not to be named by ranks that ask later. lost: a connection
        has ended, which others may not have noticed yet.
        """
        first: list[str] = ["0"] if self._rank else []
        found: list[list[str]] = []

        def ask() -> None:
            try:
                self._closed.set()
                self._telling.join()  # it may be taking back what it has said
                self._store.set(self._key(self._rank), "")
                if lost:
                    time.sleep(_GRACE)
                others = [rank for rank in range(self._size) if rank != self._rank]
                here = [self._store.check([self._key(rank)]) for rank in others]
                found.append([str(r) for r, waits in zip(others, here, strict=True) if not waits])
            except RuntimeError:  # the store was in a rank that is gone
                found.append(first)

        # The store is in rank 0: if that hangs, there is no answer.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ANSWER + _GRACE * lost)
        return found[0] if found else first

    def close(self) -> None:
        """End the thread. One that the store does not answer is left."""
        self._closed.set()
        self._telling.join(_ANSWER)

    def _key(self, rank: int) -> str:
        return f"waits/{rank}"

    def _tell(self) -> None:
        """Tell the store again and again how it is, until this is closed."""
        said = 0
        while not self._closed.wait(self._soon / 2):
            try:
                said = self.tell(said)
            except RuntimeError:  # the store was in a rank that is gone: the call fails as well
                return

    def tell(self, said: int) -> int:
        """Say in the store that this rank waits, or take it back when it has gone on. said: the
        number of the call about which it was said, 0 for none. Returns the same for now.
        """
        begun, call = self._begun, self._calls
        if said and (begun is None or call != said):
            self._store.delete_key(self._key(self._rank))
            said = 0
        if not said and begun is not None and time.monotonic() - begun >= self._soon:
            self._store.set(self._key(self._rank), "")
            said = call
        return said

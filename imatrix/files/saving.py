"""Write the importance matrix while it is collected, with copies by number of chunks and a
snapshot to resume from.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping

from ...formats.arguments import whole_number
from ...formats.disk import output_error
from ...formats.output import check_output
from ..data import Imatrix, Snapshot
from .load import output_format_of, save_imatrix
from .snapshot import load_snapshot, save_snapshot

log = logging.getLogger(__name__)

_LEAST_SECONDS = 60.0  # between two writes of the default frequency
_DEFAULT_EVERY = 10


class Saver:
    """Write `out` and `<out>.resume` after every `every` chunks (None: 10, at most once a minute;
    0: only at the end), and `<out>.at_<chunks>` after every `keep_every` chunks (0: never).

    `run` says what the sums depend on; `combined` turns them into what is written. The collector
    calls this object after every pass (`collecting.PassCallback`).
    """

    def __init__(
        self,
        out: str | os.PathLike,
        output_format: str | None,
        run: Mapping[str, str],
        *,
        every: int | None = None,
        keep_every: int = 0,
        combined: Callable[[Imatrix], Imatrix] = lambda imatrix: imatrix,
    ):
        whole_number("the number of chunks between two writes", every or 0, 0)
        whole_number("the number of chunks between two copies", keep_every, 0)
        self.out, self.format, self.run, self.combined = (
            os.fspath(out),
            output_format_of(out, output_format),
            run,
            combined,
        )
        self.every, self.keep_every, self.resume_path = (
            every,
            keep_every,
            os.fspath(out) + ".resume",
        )
        self._saved = self._seen = 0
        self._saved_at = time.monotonic()

    def start(self, resume: bool) -> Snapshot | None:
        """Return the snapshot to resume from, if `resume` is set and there is one. Raise
        ImatrixError if it is of another run, OutputError if the results cannot be written.
        """
        for path in (self.out, self.resume_path):
            check_output(path)
        if not os.path.exists(self.resume_path):
            return None
        if not resume:
            log.info(
                "%s of an interrupted run is not used: --resume would use it",
                self.resume_path,
            )
            return None
        snapshot = load_snapshot(self.resume_path, self.run)
        self._saved = self._seen = snapshot.imatrix.chunk_count
        log.info("resuming after %d chunks", self._saved)
        return snapshot

    def __call__(self, done: int, take: Callable[[], Snapshot]) -> None:
        keep, write = self._passed(done), self._due(done)
        if not keep and not write:
            return
        snapshot = take()
        imatrix = self.combined(snapshot.imatrix.whole())
        if write:
            save_snapshot(snapshot, self.resume_path, self.run)
            save_imatrix(imatrix, self.out, self.format)
            self._saved, self._saved_at = done, time.monotonic()
        if keep:
            save_imatrix(imatrix, f"{self.out}.at_{done}", self.format)

    def finish(self, imatrix: Imatrix) -> Imatrix:
        """Write the result and remove the snapshot. Returns what was written."""
        done, imatrix = imatrix.chunk_count, self.combined(imatrix.whole())
        if self._passed(done):
            save_imatrix(imatrix, f"{self.out}.at_{done}", self.format)
        save_imatrix(imatrix, self.out, self.format)
        try:
            os.unlink(self.resume_path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise output_error(error, self.resume_path) from None
        return imatrix

    def _passed(self, done: int) -> bool:
        seen, self._seen = self._seen, done
        return self.keep_every > 0 and done // self.keep_every > seen // self.keep_every

    def _due(self, done: int) -> bool:
        if self.every is None:
            return (
                done - self._saved >= _DEFAULT_EVERY
                and time.monotonic() - self._saved_at >= _LEAST_SECONDS
            )
        return 0 < self.every <= done - self._saved

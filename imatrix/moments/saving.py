"""Write a snapshot of second moments while they are collected, to resume from."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from ...errors import UsageError
from ...formats.disk import output_error
from ...formats.output import check_output
from .collector import MomentSums
from .file import load_moments_snapshot, save_moments, save_moments_snapshot

log = logging.getLogger(__name__)

_LEAST_SECONDS = 60.0  # between two snapshots of the default frequency


class MomentSaver:
    """Write `<out>.resume` after every `every` chunks (None: once a minute; 0: never). `run` says
    what the sums depend on. The collector calls this object after every pass.
    """

    def __init__(self, out: str | os.PathLike, run: Mapping[str, str], every: int | None = None):
        if every is not None and every < 0:
            raise UsageError(
                f"the number of chunks between two writes is {every}, expected 0 or more"
            )
        self.out, self.run, self.every = os.fspath(out), dict(run), every
        self.resume_path = self.out + ".resume"
        self._saved, self._saved_at = 0, time.monotonic()

    def start(self, total: MomentSums, resume: bool) -> MomentSums:
        """Return the snapshot to resume from, if `resume` is set and there is one, else `total`.

        Raise ImatrixError if it is of another run, OutputError if the results cannot be written.
        """
        for path in (self.out, self.resume_path):
            check_output(path)
        if not os.path.exists(self.resume_path):
            return total
        if not resume:
            log.info(
                "%s of an interrupted run is not used: --resume would use it", self.resume_path
            )
            return total
        found = load_moments_snapshot(self.resume_path, self.run, total)
        self._saved = found.done
        log.info("resuming after %d chunks", found.done)
        return found

    def __call__(self, total: MomentSums) -> None:
        if self.every is None:
            due = time.monotonic() - self._saved_at >= _LEAST_SECONDS
        else:
            due = 0 < self.every <= total.done - self._saved
        if due:
            save_moments_snapshot(total, self.resume_path, {"run": self.run})
            self._saved, self._saved_at = total.done, time.monotonic()

    def finish(self, total: MomentSums, texts: list[dict], dtype: str) -> None:
        """Write the result and remove the snapshot."""
        save_moments(total, self.out, {"run": self.run, "texts": texts}, dtype)
        try:
            os.unlink(self.resume_path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise output_error(error, self.resume_path) from None

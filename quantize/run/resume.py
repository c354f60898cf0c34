"""Outputs that a later run can resume: data is written to `.part` files, and a journal next to them
records how far it is valid.

When tensors are finished, their data is synced to the disk, in the background and at most every
CHECKPOINT_SECONDS. Then they are entered into the journal, with a hash of their bytes and their
report. A run that ends early, for whatever reason, leaves both files once a tensor is finished. The
same command finds them, checks the hashes, cuts off what follows the last valid tensor and resumes
there. It refuses to resume if anything has changed that the bytes depend on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash

from ...errors import IqforgeError, ResumeError, printable
from ...formats.gguf.sharded_writer import ShardedWriter
from ...formats.gguf.writer import GGUFWriter
from ...formats.output import real_output
from ...formats.source import TensorInfo
from ..plan.plan import PlannedTensor
from .earlier_run import FINISHING, NOTE, RUN, TENSOR, EarlierRun, file_mark, is_sound, noted
from .journal import Journal, Record
from .report import TensorReport
from .run_key import RunKey, changes

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 2.0
_REPORTED = ("rmse", "weighted_rmse", "weighted", "largest_error", "zeroed")


class ResumableOutput:
    """A sink that a later run can resume. `finished`: reports of the tensors that an earlier run
    has written, which must not be written again. `note`: returns what else is to be known of a
    tensor that is finished now; `noted`: what earlier runs returned, by tensor.

    As a context manager it keeps finished tensors for a later run if it is left without
    `finish_all`, and removes its files if there are none.
    """

    def __init__(
        self,
        out: str | os.PathLike,
        files: Sequence[str],
        open_writer: Callable[[bool], GGUFWriter | ShardedWriter],
        planned: Sequence[PlannedTensor],
        key: RunKey,
        restart: bool = False,
    ):
        """out: the user's name of the output. files: paths of the file or its shards.
        open_writer(keep) opens their writer. key: what the bytes depend on. restart: drop what an
        earlier run left.

        Raise ResumeError if an earlier run with another key left finished tensors.
        """
        self.out, self.files, self.planned = real_output(out), files, planned
        self.finished: list[TensorReport] = []
        self.note: Callable[[str], Record | None] = lambda name: None
        self.noted: dict[str, Record] = {}
        self._opened: GGUFWriter | ShardedWriter | None = None
        self._hash, self._entered = xxhash.xxh64(), 0
        self._pending: list[Record] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[int] | None = None
        self._checkpointed, self._complete, self._done = time.monotonic(), False, False
        self._unsynced = False
        self._journal = Journal(self.out + ".journal", self.out)
        try:
            self._open(open_writer, key, restart)
        except BaseException:
            self._give_up()
            raise

    def _open(
        self, open_writer: Callable[[bool], GGUFWriter | ShardedWriter], key: RunKey, restart: bool
    ) -> None:
        journal = self._journal
        earlier = EarlierRun(self.out, journal)
        entries = earlier.entries
        self._entered = len(entries)
        if not restart and earlier.can_resume():
            before = earlier.keys[-1]
            if found := changes(before, key):
                raise ResumeError(
                    f"cannot resume the unfinished run with {len(entries)} of"
                    f" {len(before['tensors'])} tensors done: {'; '.join(found)}. Run the"
                    " same command as before to resume, or pass --restart to start from scratch",
                    file=self.out,
                )
            earlier.take_back()
            self._resume(open_writer(True), entries, before, key)
            return
        self._entered = 0
        earlier.remove_parts()
        journal.keep(0)
        self._opened = open_writer(False)
        journal.append({RUN: key})

    @property
    def _writer(self) -> GGUFWriter | ShardedWriter:
        if self._opened is None:
            raise RuntimeError("the output is not open")
        return self._opened

    def _resume(
        self, writer: GGUFWriter | ShardedWriter, entries: list[Record], before: RunKey, key: RunKey
    ) -> None:
        self._opened = writer
        checked = iter(entries)
        log.info(
            "%s: checking %d finished tensors of an earlier run",
            printable(self.out, 400),
            len(entries),
        )
        count = writer.resume(lambda tensor, pieces: is_sound(next(checked, None), tensor, pieces))
        log.info(
            "%s: resuming after %d of %d tensors",
            printable(self.out, 400),
            count,
            len(self.planned),
        )
        if count < len(entries):
            log.warning(
                "%s: the data of %d more tensors does not match the journal",
                printable(self.out, 400),
                len(entries) - count,
            )
        self._entered = count
        places = [at for at, record in enumerate(self._journal.records) if TENSOR in record]
        self._journal.keep(places[count - 1] + 1 if count else 0)
        if not count or before != key:
            self._journal.append({RUN: key})
        self.finished = [
            TensorReport(plan, **{name: entry[name] for name in _REPORTED})
            for plan, entry in zip(self.planned, entries[:count])
        ]
        self.noted = noted(entries[:count])

    def stored(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor that is written, by this run or an earlier one."""
        return self._writer.stored(name)

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append bytes of a tensor; see `Sink.write`."""
        data = np.ascontiguousarray(data)
        self._writer.write(tensor, data)
        if data.size:
            self._hash.update(data.data)

    def tensor_done(self, report: TensorReport) -> None:
        """Record that the last byte of the next tensor was written."""
        name = report.planned.target.name
        record: Record = {TENSOR: name, "xxh64": self._hash.hexdigest()}
        record |= {key: getattr(report, key) for key in _REPORTED}
        if (note := self.note(name)) is not None:
            record[NOTE] = note
        self._pending.append(record)
        self._hash = xxhash.xxh64()
        if self._saving is not None and self._saving.done():
            self._saved()
        if self._saving is None and time.monotonic() - self._checkpointed >= CHECKPOINT_SECONDS:
            self._saving = self._pool.submit(self._save, list(self._pending))

    def _save(self, entries: list[Record]) -> int:
        try:
            self._writer.sync()
        except BaseException:
            self._unsynced = True
            raise
        self._journal.append(*entries)
        return len(entries)

    def _saved(self) -> None:
        """Wait for the checkpoint under way, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            count = saving.result()
            self._entered += count
            del self._pending[:count]
            self._checkpointed = time.monotonic()

    def _checkpoint(self) -> None:
        self._saved()
        if self._pending:
            self._entered += self._save(self._pending)
            self._pending = []

    def _finish(self) -> None:
        """Write everything, and keep the `.part` names."""
        self._checkpoint()
        self._writer.complete()
        self._journal.append(
            {FINISHING: {os.path.basename(file): file_mark(file + ".part") for file in self.files}}
        )
        self._complete = True

    def _commit(self) -> None:
        self._writer.commit()

    def _forget(self) -> None:
        self._journal.remove()
        self._pool.shutdown()
        self._done = True

    def leave(self) -> None:
        """Keep finished tensors for a later run, drop the rest. Does nothing after `finish_all`."""
        if self._done:
            return
        self._done = True
        try:
            self._pool.shutdown()
            # A full disk has space for the journal once the unfinished tensor is removed.
            with contextlib.suppress(IqforgeError):
                self._saved()
            if not self._complete:
                self._writer.cut()
            # A second sync would succeed, though the system may have dropped what the first failed
            # to write.
            if not self._unsynced:
                self._checkpoint()
        except IqforgeError as error:
            log.warning("%s", error)
        finally:  # also after another Ctrl-C while waiting for the disk
            self._give_up()

    def _give_up(self) -> None:
        self._done = True
        try:
            self._pool.shutdown()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        if self._entered == 0:
            if self._opened is not None:
                self._opened.abort()
            self._journal.remove()
            return
        if self._opened is not None:
            self._opened.leave()
            log.warning(
                "%s: %d of %d tensors are kept; run the same command to resume, or pass --restart"
                " to start from scratch",
                printable(self.out + ".part", 400),
                self._entered,
                len(self.planned),
            )
        self._journal.close()

    def __enter__(self) -> ResumableOutput:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()


def finish_all(
    outputs: Sequence[ResumableOutput], checks: Sequence[Callable[[list[str]], None]] = ()
) -> None:
    """Rename all outputs of a run once all are complete. If the process is killed here, the next
    run finishes it.

    checks: one for each output or none, called with its `.part` files. If one raises, no output is
    renamed.
    """
    for output in outputs:
        output._finish()
    for output, check in zip(outputs, checks):
        check([f"{file}.part" for file in output.files])
    for output in outputs:
        output._commit()
    for output in outputs:
        output._forget()

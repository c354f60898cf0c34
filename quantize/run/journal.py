"""The journal next to an unfinished output: the run that was started, and the tensors that are
finished.

A line is the XXH64 of a record and the record as JSON: `0123456789abcdef {"tensor": ..}`. Lines are
appended and synced, each after the data that it describes, so that everything in the journal is
also on the disk. A line that was torn by a power cut, or damaged, does not match its hash: it ends
the journal, and the lines after it are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any

import xxhash

from ...errors import OutputError
from ...formats.disk import output_error
from ...formats.output import open_locked, sync_folder

Record = dict[str, Any]
_BEGINNING = re.compile(rb"[0-9a-f]{0,16}|[0-9a-f]{16} ")  # of a journal, perhaps torn


class Journal:
    """The file at `path`, created if missing, and locked for this process until `close` or
    `remove`. `records`: its content.

    Raise OutputError naming the output `named` if it cannot be opened or written, or if another
    process holds it; naming the file, which is left alone, if it is not a journal.
    """

    def __init__(self, path: str, named: str):
        self.path, self.named = path, named
        self._fd = open_locked(path, named)
        self.records: list[Record] = []
        self._ends = [0]  # the end of each record in bytes, after a 0 for no record
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        try:
            with open(self._fd, "rb", closefd=False) as file:
                data = file.read()
                # A power cut may leave zeros.
                if data.strip(b"\0") and not _BEGINNING.fullmatch(data[:17]):
                    raise OutputError(
                        "exists and is not a journal; move or delete it",
                        file=self.path,
                    )
                for line in data.splitlines(keepends=True):
                    record = _parsed(line)
                    if record is None:
                        return
                    self.records.append(record)
                    self._ends.append(self._ends[-1] + len(line))
        except OSError as error:
            raise output_error(error, self.path) from None

    def keep(self, n_records: int) -> None:
        """Cut off everything after the first `n_records` records. Raise the error of
        `disk.output_error` if that fails.
        """
        try:
            os.ftruncate(self._fd, self._ends[n_records])
            os.fsync(self._fd)
        except OSError as error:
            raise output_error(error, self.path) from None
        del self.records[n_records:], self._ends[n_records + 1 :]

    def append(self, *records: Record) -> None:
        """Append records. They survive a power cut once this returns. Any thread may call it. Raise
        the error of `disk.output_error` if that fails.
        """
        lines = [_line(record) for record in records]
        try:
            data, at = memoryview(b"".join(lines)), self._ends[-1]
            while data:
                written = os.pwrite(self._fd, data, at)
                data, at = data[written:], at + written
            os.fsync(self._fd)
        except OSError as error:
            raise output_error(error, self.named) from None
        for record, line in zip(records, lines):
            self.records.append(record)
            self._ends.append(self._ends[-1] + len(line))
        if len(self.records) == len(records):  # a new file
            sync_folder(os.path.dirname(self.path))

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Delete the file. Does nothing after `close`."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            sync_folder(os.path.dirname(self.path))
        self.close()


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return _hash(text) + b" " + text + b"\n"


def _parsed(line: bytes) -> Record | None:
    """Return the record of a complete and undamaged line, None for any other."""
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or _hash(text) != digest:
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None


def _hash(text: bytes) -> bytes:
    return xxhash.xxh64(text).hexdigest().encode()

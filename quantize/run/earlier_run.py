"""What an earlier run of an output left: the records in its journal, its `.part` files, and files
that it was renaming when it ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import xxhash

from ...formats.output import real_output, sync_folder
from ...formats.source import TensorInfo
from .journal import Journal, Record
from .run_key import RunKey

# Kinds of records, by the first key of each; and a key of a tensor's record, see `noted`.
RUN, TENSOR, FINISHING = "run", "tensor", "finishing"
NOTE = "note"


class EarlierRun:
    """The files of `out` that an earlier run left, as `journal` records them.

    keys: of the runs that it was resumed in, oldest first. entries: records of finished tensors.
    """

    def __init__(self, out: str, journal: Journal):
        self._folder, records = os.path.dirname(out), journal.records
        self.keys: list[RunKey] = [record[RUN] for record in records if RUN in record]
        self.entries = [record for record in records if TENSOR in record]
        self._marks: dict[str, list[int]] = next(
            (record[FINISHING] for record in records if FINISHING in record), {}
        )

    def can_resume(self) -> bool:
        """Return whether tensors were finished, and any file that holds them is still there."""
        return bool(self.entries) and (
            any(os.path.exists(part) for part in self._parts(self.keys[-1])) or bool(self._named())
        )

    def take_back(self) -> None:
        """Rename files that got their names just before the run ended back to `.part` until they
        are checked.
        """
        for file in self._named():
            if not os.path.exists(file + ".part"):
                os.replace(file, file + ".part")
        sync_folder(self._folder)

    def remove_parts(self) -> None:
        """Delete all `.part` files."""
        for key in self.keys:
            for part in self._parts(key):
                with contextlib.suppress(OSError):
                    os.unlink(part)

    def _parts(self, key: RunKey) -> list[str]:
        return [self._beside(name) + ".part" for name in key["files"]]

    def _named(self) -> list[str]:
        """Return the files that were renamed just before the run ended, if they are still those
        that it wrote: an older file must stay while nothing replaces it.
        """
        files = [(self._beside(name), mark) for name, mark in self._marks.items()]
        return [file for file, mark in files if os.path.exists(file) and file_mark(file) == mark]

    def _beside(self, name: str) -> str:
        return os.path.join(self._folder, os.path.basename(name))


def noted(entries: list[Record]) -> dict[str, Record]:
    """Return what else the runs have recorded of these tensors, by name."""
    return {entry[TENSOR]: entry[NOTE] for entry in entries if entry.get(NOTE) is not None}


def file_mark(file: str) -> list[int]:
    """Return what identifies a file even after it is renamed."""
    state = os.stat(file)
    return [state.st_ino, state.st_size, state.st_mtime_ns]


def is_sound(entry: Record | None, tensor: TensorInfo, pieces: Iterator[bytes]) -> bool:
    """Return whether `entry` is the record of this tensor and the bytes in `pieces` are those it
    was made for.
    """
    if entry is None or entry[TENSOR] != tensor.name:
        return False
    hasher = xxhash.xxh64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest() == entry["xxh64"]


def unfinished_files(out: str | os.PathLike) -> set[str]:
    """Return the names of the files that a run was renaming when it was killed. Some may have been
    renamed already.
    """
    path = real_output(out) + ".journal"
    if not os.path.exists(path):
        return set()
    journal = Journal(path, real_output(out))
    journal.close()
    if not any(FINISHING in record for record in journal.records):
        return set()
    return {name for record in journal.records if RUN in record for name in record[RUN]["files"]}

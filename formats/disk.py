"""Check the space on disks before files are written, and name the errors of disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import OutputError

_BLOCK = 512  # bytes, the unit of st_blocks


def reason(error: OSError | ValueError) -> str:
    """Return what the operating system says about `error`. Python raises ValueError for paths with
    a NUL.
    """
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def output_error(
    error: OSError | ValueError, file: str | os.PathLike, detail: str = ""
) -> OutputError:
    """Return `error` as an OutputError that names the file."""
    return OutputError(f"cannot be written: {reason(error)}{detail}", file=file)


def check_space(folder: str | os.PathLike, n_bytes: int, file: str | os.PathLike) -> None:
    """Raise OutputError with both numbers if fewer than `n_bytes` are free where `folder` is."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        raise output_error(error, file) from None
    if usage.total and usage.free < n_bytes:  # some network file systems report nothing at all
        raise OutputError(f"needs {n_bytes} bytes, {usage.free} are free", file=file)


@dataclass(frozen=True)
class DiskNeed:
    """The bytes that files take on one disk, that of `folder`, and the bytes that are free there
    (-1 if the disk does not say).
    """

    folder: str
    needed: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether the space suffices; true where the free space is not known."""
        return self.free < 0 or self.needed <= self.free


def disk_needs(files: Iterable[tuple[str | os.PathLike, int]]) -> list[DiskNeed]:
    """Return the bytes that `files`, pairs of path and size to come, take on each disk. A file that
    is replaced still counts, as it is deleted when the new one is complete. Raise OutputError for a
    folder that does not exist.
    """
    needs: dict[int, DiskNeed] = {}
    for path, n_bytes in files:
        folder = os.path.dirname(os.path.realpath(path))
        try:
            disk, usage = os.stat(folder).st_dev, shutil.disk_usage(folder)
        except OSError as error:
            raise output_error(error, path) from None
        known = needs.get(disk, DiskNeed(folder, 0, usage.free if usage.total else -1))
        needs[disk] = replace(known, needed=known.needed + n_bytes)
    return list(needs.values())


def check_disks(files: Sequence[tuple[str | os.PathLike, int]]) -> None:
    """Raise OutputError with both numbers if the files together need more than is free on one of
    their disks.
    """
    for need in disk_needs(files):
        if not need.fits:
            raise OutputError(
                f"the output files need {need.needed} bytes, {need.free} are free",
                file=need.folder,
            )


def size_on_disk(path: str | os.PathLike) -> int:
    """Return how many bytes a file takes on its disk, without holes; 0 if there is none."""
    try:
        return os.stat(path).st_blocks * _BLOCK
    except OSError:
        return 0

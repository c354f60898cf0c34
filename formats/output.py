"""Write output files that never look finished before they are: `<name>.part`, locked, synced,
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable

from ..errors import OutputError, printable
from .disk import check_space, output_error, size_on_disk

WRITE_BEHIND = 32 << 20  # bytes
# Errors of network file systems without locks.
_NO_LOCKS = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
)


def refuse_same_file(output: str | os.PathLike, inputs: Iterable[str | os.PathLike]) -> None:
    """Raise OutputError if `output` is one of the `inputs`, also through symbolic or hard links."""
    for path in inputs:
        try:
            same = os.path.samefile(output, path)
        except (OSError, ValueError):
            continue
        if same:
            raise OutputError(
                f"the output is the same file as the input {printable(os.fspath(path), 400)}",
                file=output,
            )


def check_folder(path: str | os.PathLike) -> None:
    """Raise OutputError if the folder of an output does not exist."""
    if not os.path.exists(os.path.dirname(real_output(path))):
        missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise output_error(missing, path)


def check_output(path: str | os.PathLike) -> None:
    """Raise OutputError if no file can be written at `path`: for work that takes long before
    anything is written. No file is left.
    """
    PartFile(path).abort()


def real_output(path: str | os.PathLike) -> str:
    """Return the file that an output replaces: symbolic links are followed."""
    if not os.fspath(path):
        raise OutputError("the name of the output is empty")
    try:
        return os.path.realpath(path)
    except (OSError, ValueError) as error:
        raise output_error(error, path) from None


def sync_folder(folder: str | os.PathLike) -> None:
    """Make renames inside `folder` survive a power cut, where the file system can."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def begin_writing(fd: int, start: int, stop: int) -> None:
    """Start writing to the disk. Dirty pages that are "not needed" are queued for the disk and stay
    in memory until they are written.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def lock_file(fd: int, *, wait: bool = False) -> None:
    """Lock an open file for this process alone, except on a file system without locks. Raise
    BlockingIOError if another process holds the lock and this one is not to `wait`.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def open_locked(path: str, named: str) -> int:
    """Return a handle on the file at `path`, created if needed and locked for this process alone.
    Errors name the output `named`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except (OSError, ValueError) as error:
        raise output_error(error, named) from None
    try:
        lock_file(fd)
        # Between open and lock another process may have renamed or removed this very file.
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        raise OutputError("another process is writing this file", file=named) from None
    except OSError as error:
        os.close(fd)
        raise output_error(error, named) from None
    return fd


class PartFile:
    """`<path>.part`, opened and locked for this process alone; becomes `path` by `commit`, or
    nothing by `abort`.

    A symbolic link at `path` is followed: the file it points to is the one that is replaced. A
    `.part` that a killed run left is overwritten, unless it is asked for by `keep`; one that
    another process is writing is an OutputError. As a context manager it commits at the end and
    aborts on any exception, KeyboardInterrupt included.
    """

    def __init__(self, path: str | os.PathLike, n_bytes: int | None = None, keep: bool = False):
        """`n_bytes`: the size to come, if known; OutputError at once if the disk has less left.
        keep: the contents of the `.part` stay for `read_kept`, until `continue_at` sets where
        writing continues.
        """
        self.path = real_output(path)
        self.part_path = self.path + ".part"
        self.n_bytes, self.position = n_bytes, 0
        self._begun = 0  # up to where the disk was told to write
        self._done = False
        self._fd: int | None = self._locked()
        try:
            kept = min(size_on_disk(self.part_path), n_bytes or 0) if keep else 0
            if not keep:
                os.ftruncate(self._fd, 0)
            if n_bytes is not None:
                check_space(os.path.dirname(self.path), n_bytes - kept, self.path)
        except BaseException:
            self.leave() if keep else self.abort()
            raise

    def _locked(self) -> int:
        try:
            if os.path.isdir(self.path):
                raise OutputError("cannot be written: it is a folder", file=self.path)
            if os.path.lexists(self.path) and not stat.S_ISREG(os.stat(self.path).st_mode):
                raise OutputError("exists and is not a regular file", file=self.path)
        except OSError as error:
            raise output_error(error, self.path) from None
        return open_locked(self.part_path, self.path)

    @property
    def _handle(self) -> int:
        if self._fd is None:
            raise OutputError("was written and closed already", file=self.path)
        return self._fd

    def write(self, data) -> None:
        """Append all of `data`, anything with a contiguous buffer. The disk begins to write at
        once, not when memory is full. Raise the error of `disk.output_error` if that fails.
        """
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            while view:
                n_written = os.write(self._handle, view)
                self.position += n_written
                view = view[n_written:]
            if self.position - self._begun >= WRITE_BEHIND:
                begin_writing(self._handle, self._begun, self.position)
                self._begun = self.position
        except OSError as error:
            raise output_error(error, self.path, self._state()) from None

    def read_kept(self, start: int, size: int) -> bytes:
        """Return bytes that an earlier run left, fewer than `size` where they end. Raise the error
        of `disk.output_error` if that fails.
        """
        try:
            return os.pread(self._handle, size, start)
        except OSError as error:
            raise output_error(error, self.part_path) from None

    def continue_at(self, position: int) -> None:
        """Cut the file at this offset (or extend it with zeros), and write what follows from there.
        Raise the error of `disk.output_error` if that fails.
        """
        try:
            os.ftruncate(self._handle, position)
            os.lseek(self._handle, position, os.SEEK_SET)
        except OSError as error:
            raise output_error(error, self.path, self._state()) from None
        self.position = self._begun = position

    def _state(self) -> str:
        needs = "" if self.n_bytes is None else f" of {self.n_bytes}"
        try:
            free = f", {shutil.disk_usage(os.path.dirname(self.path)).free} are free"
        except OSError:
            free = ""
        return f" ({self.position}{needs} bytes are written{free})"

    def sync(self) -> None:
        """Flush what is written to the disk. Raise the error of `output_error`, which names the
        file, if that fails.
        """
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise output_error(error, self.path, self._state()) from None

    def remove_older(self) -> None:
        """Delete the file that has the final name so far, if there is one. Raise the error of
        `disk.output_error` if that fails.
        """
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise output_error(error, self.path) from None

    def commit(self) -> None:
        """Sync, rename to the final name, sync the folder, unlock. Raise the error of
        `disk.output_error` if that fails.
        """
        if self._fd is not None:
            self.sync()
        try:
            os.replace(self.part_path, self.path)
        except OSError as error:
            raise output_error(error, self.path) from None
        self._done = True
        sync_folder(os.path.dirname(self.path))
        self._close()

    def park(self) -> None:
        """Sync, and give the handle and the lock back; `commit` or `abort` comes later. This is for
        one of many files that get their names together, while another of them holds a lock.
        """
        self.sync()
        self._close()

    def leave(self) -> None:
        """Keep the unfinished `.part` so that a later run can resume it with `keep`; close it."""
        self._done = True
        self._close()

    def abort(self) -> None:
        """Remove the `.part`. Does nothing after `commit`, `leave` or a second time."""
        if not self._done:
            self._done = True
            with contextlib.suppress(OSError):
                os.unlink(self.part_path)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()

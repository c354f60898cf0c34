"""Entries whose values stay in their file until they are used, as the entries of a large model may
not fit in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from ..errors import ImatrixError, NotFoundError, TruncatedFileError
from .data import Entry


class OpenFile:
    """A file that any thread can read at any offset. It stays open, even if another file gets its
    name.
    """

    def __init__(self, path: str):
        self.path, self._fd = path, -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
        except FileNotFoundError:
            raise NotFoundError("no such file", file=path) from None
        except OSError as error:
            raise ImatrixError(f"cannot be read: {error.strerror}", file=path) from None

    def read(self, offset: int, n: int, what: str) -> bytes:
        """Return exactly `n` bytes. Raise TruncatedFileError if there are fewer."""
        pieces, at = [], offset
        try:
            while at < offset + n and (piece := os.pread(self._fd, offset + n - at, at)):
                pieces.append(piece)
                at += len(piece)
        except OSError as error:
            raise ImatrixError(f"cannot be read: {error.strerror}", file=self.path) from None
        if at < offset + n:
            raise TruncatedFileError(
                f"ends {at - offset} bytes after the start of {what} ({n} bytes)",
                file=self.path,
                offset=offset,
            )
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __reduce__(self) -> tuple:
        return OpenFile, (self.path,)  # a copy, also in another process, opens it again

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class StoredEntry(Entry):
    """An entry whose sums are float32 in `file` at `offset`; every access reads them again."""

    def __init__(
        self,
        file: OpenFile,
        offset: int,
        shape: tuple[int, int],
        counts: np.ndarray,
        calls: int | None = None,
    ):
        self.file, self.offset, self._shape, self.counts, self.calls = (
            file,
            offset,
            shape,
            counts,
            calls,
        )

    @property
    def sums(self) -> np.ndarray:
        """Read the sums of squares: float64[matrices, columns]. Raise the error of the file's
        `read` if it is cut.
        """
        return (
            np.frombuffer(self.file.read(self.offset, 4 * self.size, "values"), "<f4")
            .astype(np.float64)
            .reshape(self.shape)
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def matrices(self, n: int) -> Entry:
        return StoredEntry(
            self.file, self.offset, (n, self.size // n), np.broadcast_to(self.counts, n), self.calls
        )


class ComputedEntries(Mapping):
    """Entries by `names`, each made by `make(name)` at every access."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Entry]):
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Entry:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

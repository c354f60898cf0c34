"""A bounds-checked cursor over the bytes of a file. Every count and length is checked against the
bytes that are left before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from ...errors import TruncatedFileError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Read little-endian values in order. Every read names what it reads, for the error message.

    `buffer` is the start of a file of `size` bytes, by default all of it; `prefix(n)` returns the
    first `n` bytes of the file, for reads beyond the buffer.
    """

    __slots__ = ("_prefix", "buffer", "file", "position", "size")

    def __init__(
        self,
        buffer: bytes,
        file: str,
        size: int | None = None,
        prefix: Callable[[int], bytes] | None = None,
    ):
        self.buffer, self.file, self.position = buffer, file, 0
        self.size = len(buffer) if size is None or prefix is None else size
        self._prefix = prefix

    def load(self, end: int) -> bytes:
        """Return a buffer with at least the first `end` bytes, which the file must have."""
        if end > len(self.buffer) and self._prefix is not None:
            self.buffer = self._prefix(min(self.size, max(end, 2 * len(self.buffer))))
        return self.buffer

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return self.size - self.position

    def take(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start. Raise TruncatedFileError if fewer are
        left.
        """
        start = self.position
        if n_bytes > self.size - start:
            raise TruncatedFileError(
                f"{what} takes {n_bytes} bytes, {self.size - start} are left in the file",
                file=self.file,
                offset=start,
            )
        self.position = start + n_bytes
        if self.position > len(self.buffer):
            self.load(self.position)
        return start

    def u32(self, what: str) -> int:
        """Read a little-endian uint32. `what` names it in the error; see `take`."""
        start = self.take(4, what)
        return _U32.unpack_from(self.buffer, start)[0]

    def u64(self, what: str) -> int:
        """Read a little-endian uint64. `what` names it in the error; see `take`."""
        start = self.take(8, what)
        return _U64.unpack_from(self.buffer, start)[0]

    def bytes(self, n_bytes: int, what: str) -> bytes:
        """Read `n_bytes` bytes. `what` names them in the error; see `take`."""
        start = self.take(n_bytes, what)
        return self.buffer[start : start + n_bytes]

    def unpack(self, layout: str, what: str) -> tuple:
        """Return all values of a struct `layout` (with its byte order mark)."""
        start = self.take(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self.buffer, start)

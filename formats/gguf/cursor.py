"""A bounds-checked cursor over the bytes of a file: no count or length is believed before it fits
into what is left.
"""

from __future__ import annotations

import mmap
import struct

from ...errors import TruncatedFileError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Reads little-endian values from `buffer` in order. Every read names what it reads, for the
    error message.
    """

    __slots__ = ("buffer", "file", "position", "size")

    def __init__(self, buffer: bytes | mmap.mmap, file: str):
        self.buffer, self.file, self.position, self.size = buffer, file, 0, len(buffer)

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes` and return where they start. TruncatedFileError if fewer are left."""
        start = self.position
        if n_bytes > self.size - start:
            raise TruncatedFileError(
                f"{what} takes {n_bytes} bytes, {self.size - start} are left in the file",
                file=self.file,
                offset=start,
            )
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.buffer, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.buffer, self.take(8, what))[0]

    def bytes(self, n_bytes: int, what: str) -> bytes:
        start = self.take(n_bytes, what)
        return self.buffer[start : start + n_bytes]

    def unpack(self, layout: str, what: str) -> tuple:
        """All values of a struct `layout` (with its byte order mark)."""
        return struct.unpack_from(layout, self.buffer, self.take(struct.calcsize(layout), what))

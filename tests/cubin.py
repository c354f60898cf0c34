"""What a compiled kernel, an ELF file of 64 bits, contains."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SYMBOLS, _EXECUTABLE = 2, 4


def _sections(code: bytes) -> list[tuple]:
    (sections,) = struct.unpack_from("<Q", code, 0x28)
    size, count, _ = struct.unpack_from("<HHH", code, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", code, sections + size * i) for i in range(count)]


def functions(code: bytes) -> list[str]:
    """Return the names of the functions."""
    headers, found = _sections(code), []
    for _, kind, _, _, begin, length, link, *_ in headers:
        for at in range(begin, begin + length if kind == _SYMBOLS else begin, 24):
            name, info = struct.unpack_from("<IB", code, at)
            if info & 15 == 2:  # of functions
                start = headers[link][4] + name
                found.append(code[start : code.index(b"\0", start)].decode())
    return found


def opcodes(code: bytes) -> Iterator[int]:
    """Yield the lowest 12 bits of every instruction, which say what it is and what kinds of
    operands it has.
    """
    for _, _, flags, _, begin, length, *_ in _sections(code):
        for at in range(begin, begin + length if flags & _EXECUTABLE else begin, 16):
            yield struct.unpack_from("<H", code, at)[0] & 0xFFF

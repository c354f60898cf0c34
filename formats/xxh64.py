"""XXH64, streamed: the 64-bit hash of the xxHash specification (https://github.com/Cyan4973/xxHash,
doc/xxhash_spec.md), seed 0.

Four accumulators take 32 bytes at a time: acc = rotl(acc + lane * P2, 31) * P1. At the end they are
folded together, the length is added, what is left of the input follows in words of 8, 4 and 1
bytes, and the bits are mixed. Only the first step sees many bytes, so only that one is compiled.
"""

from __future__ import annotations

import functools

import numpy as np

from .kernel import device_function

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = (1 << 64) - 1
_STRIPE = 32


def _accumulate(accumulators, lanes):
    """uint64[4], uint64[4 n]: the stripes of `lanes` go into `accumulators`."""
    p1, p2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
    left, right = np.uint64(31), np.uint64(33)
    a, b, c, d = accumulators[0], accumulators[1], accumulators[2], accumulators[3]
    for i in range(0, lanes.size, 4):
        a += lanes[i] * p2
        b += lanes[i + 1] * p2
        c += lanes[i + 2] * p2
        d += lanes[i + 3] * p2
        a = ((a << left) | (a >> right)) * p1
        b = ((b << left) | (b >> right)) * p1
        c = ((c << left) | (c >> right)) * p1
        d = ((d << left) | (d >> right)) * p1
    accumulators[0], accumulators[1], accumulators[2], accumulators[3] = a, b, c, d


@functools.cache
def _compiled():
    return device_function(_accumulate)


def _rotated(x: int, n: int) -> int:
    return (x << n | x >> (64 - n)) & _MASK


def _round(accumulator: int, lane: int) -> int:
    return _rotated((accumulator + lane * _P2) & _MASK, 31) * _P1 & _MASK


class XXH64:
    """As the objects of hashlib: `update` with any contiguous bytes, then `hexdigest`, after which
    more may follow.
    """

    name = "xxh64"

    def __init__(self) -> None:
        self._accumulators = np.array([(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK], np.uint64)
        self._rest, self._length = b"", 0

    def update(self, data) -> None:
        view = np.frombuffer(data, np.uint8)
        self._length += view.size
        if self._rest:
            missing = _STRIPE - len(self._rest)
            self._rest += view[:missing].tobytes()
            view = view[missing:]
            if len(self._rest) < _STRIPE:
                return
            self._take(np.frombuffer(self._rest, np.uint8))
        whole = view.size - view.size % _STRIPE
        if whole:
            self._take(view[:whole])
        self._rest = view[whole:].tobytes()

    def _take(self, stripes: np.ndarray) -> None:
        # An offset in a file need not be a multiple of 8: such views are copied, piece by piece as
        # they come.
        lanes = (
            stripes.view("<u8")
            if stripes.ctypes.data % 8 == 0
            else np.frombuffer(stripes.tobytes(), "<u8")
        )
        _compiled()(self._accumulators, lanes)

    def intdigest(self) -> int:
        a, b, c, d = (int(value) for value in self._accumulators)
        if self._length >= _STRIPE:
            hashed = (_rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)) & _MASK
            for accumulator in (a, b, c, d):
                hashed = ((hashed ^ _round(0, accumulator)) * _P1 + _P4) & _MASK
        else:
            hashed = _P5
        hashed = (hashed + self._length) & _MASK
        rest = self._rest
        while len(rest) >= 8:
            hashed = (
                _rotated(hashed ^ _round(0, int.from_bytes(rest[:8], "little")), 27) * _P1 + _P4
            ) & _MASK
            rest = rest[8:]
        if len(rest) >= 4:
            hashed = (
                _rotated(hashed ^ int.from_bytes(rest[:4], "little") * _P1 & _MASK, 23) * _P2 + _P3
            ) & _MASK
            rest = rest[4:]
        for byte in rest:
            hashed = _rotated(hashed ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
        hashed = (hashed ^ hashed >> 33) * _P2 & _MASK
        hashed = (hashed ^ hashed >> 29) * _P3 & _MASK
        return hashed ^ hashed >> 32

    def hexdigest(self) -> str:
        return f"{self.intdigest():016x}"

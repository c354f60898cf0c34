"""How keys and values are stored in a cache of a quantized type: bit for bit what
`state.cache_types` encodes.

A function stores n float32 at x in a row at `to`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ....formats.kernel import inlined_function
from ....formats.tables import IQ4NL_VALUES
from .. import vectors as v
from ..vectors.core import function

_BLOCK = 32
_LARGEST_HALF = np.float32(65504)
_BIG = np.float32(12582912)  # 1.5 * 2^23: what is added to it is rounded to an integer
# Between entries of the table; a value half way takes the lower one.
_BETWEEN = tuple(float(x) for x in (IQ4NL_VALUES[1:] + IQ4NL_VALUES[:-1]) / 2)


@function(types.int64, types.float32)
def _as_integer(builder, value):
    return builder.fptosi(value, ir.IntType(64))


@inlined_function
def _scale_stored(to, d):
    """Store a scale as half, and return what replaces a division by it."""
    v.store_half(to, min(max(d, -_LARGEST_HALF), _LARGEST_HALF))
    exact = v.half_at(to)
    return np.float32(1) / exact if exact != np.float32(0) else np.float32(0)


@inlined_function
def _code(x, inverse, low, high):
    """The nearest code, the even one of two."""
    scaled = x * inverse
    scaled = min(max(scaled, np.float32(low)), np.float32(high))
    return _as_integer((scaled + _BIG) - _BIG)


@inlined_function
def _lowest(x, n):
    found = v.float_at(x)
    for i in range(1, n):
        found = min(found, v.float_at(x + 4 * i))
    return found


@inlined_function
def _greatest(x, n):
    found = v.float_at(x)
    for i in range(1, n):
        found = max(found, v.float_at(x + 4 * i))
    return found


@inlined_function
def _store_high_bits(to, bits, i, code):
    """Add what is above the nibble of code i of a block to its bytes, which begin as 0."""
    if bits == 5:
        at = to + i // 8
        v.store_byte(at, v.byte_at(at) | (code >> 4 & 1) << (i % 8))
    elif bits == 6:
        at = to + i % 8
        place = 4 * (i % 16 // 8) + 2 * (i // 16)
        v.store_byte(at, v.byte_at(at) | (code >> 4 & 3) << place)


@inlined_function
def _store_code(to, nibbles, bits, i, code):
    _store_high_bits(to, bits, i, code)
    at = nibbles + i % 16
    before = v.byte_at(at) if i >= 16 else 0
    v.store_byte(at, before | (code & 15) << (4 * (i // 16)))


def _symmetric(bits: int) -> Any:
    middle, high = 1 << bits - 1, 4 * (bits - 4)

    def store(to, x, n):
        for _ in range(n // _BLOCK):
            least, most = _lowest(x, _BLOCK), _greatest(x, _BLOCK)
            extreme = most if most > -least else least
            inverse = _scale_stored(to, extreme / np.float32(-middle))
            for i in range(high):
                v.store_byte(to + 2 + i, 0)
            for i in range(_BLOCK):
                code = _code(v.float_at(x + 4 * i), inverse, -middle, middle - 1) + middle
                _store_code(to + 2, to + 2 + high, bits, i, code)
            to += 18 + high
            x += 4 * _BLOCK

    store.__name__ = f"store_q{bits}_0"
    return store


def _with_minimum(bits: int) -> Any:
    top, high = (1 << bits) - 1, 4 * (bits - 4)

    def store(to, x, n):
        for _ in range(n // _BLOCK):
            least, most = _lowest(x, _BLOCK), _greatest(x, _BLOCK)
            inverse = _scale_stored(to, (most - least) / np.float32(top))
            _scale_stored(to + 2, least)
            m = v.half_at(to + 2)
            for i in range(high):
                v.store_byte(to + 4 + i, 0)
            for i in range(_BLOCK):
                code = _code(v.float_at(x + 4 * i) - m, inverse, 0, top)
                _store_code(to + 4, to + 4 + high, bits, i, code)
            to += 20 + high
            x += 4 * _BLOCK

    store.__name__ = f"store_q{bits}_1"
    return store


def store_q8_0(to, x, n):
    """Store n float32 at address x as Q8_0: blocks of 34 bytes in a row at address `to`. n: a
    multiple of 32.
    """
    for _ in range(n // _BLOCK):
        extreme = max(_greatest(x, _BLOCK), -_lowest(x, _BLOCK))
        inverse = _scale_stored(to, extreme / np.float32(127))
        for i in range(_BLOCK):
            v.store_byte(to + 2 + i, _code(v.float_at(x + 4 * i), inverse, -127, 127))
        to += 34
        x += 4 * _BLOCK


def store_iq4_nl(to, x, n):
    """Store n float32 at address x as IQ4_NL: blocks of 18 bytes in a row at address `to`. n: a
    multiple of 32.
    """
    for _ in range(n // _BLOCK):
        least, most = _lowest(x, _BLOCK), _greatest(x, _BLOCK)
        extreme = most if most > -least else least
        inverse = _scale_stored(to, extreme / np.float32(-127))
        for i in range(_BLOCK):
            scaled, code = v.float_at(x + 4 * i) * inverse, 0
            for limit in _BETWEEN:
                code += int(scaled > np.float32(limit))
            _store_code(to, to + 2, 4, i, code)
        to += 18
        x += 4 * _BLOCK


def store_q8_kv(to, x, n):
    """Store n float32 at address x as Q8_KV in a row at address `to`: d float32, the sum of codes
    int32, n codes.
    """
    d = max(_greatest(x, n), -_lowest(x, n)) / np.float32(127)
    inverse = np.float32(1) / d if d != np.float32(0) else np.float32(0)
    v.store_float(to, d)
    total = 0
    for i in range(n):
        code = _code(v.float_at(x + 4 * i), inverse, -127, 127)
        v.store_byte(to + 8 + i, code)
        total += code
    v.store_long(to + 4, total)


STORES = {
    "Q8_0": store_q8_0,
    "Q6_0": _symmetric(6),
    "Q5_1": _with_minimum(5),
    "Q5_0": _symmetric(5),
    "Q4_1": _with_minimum(4),
    "Q4_0": _symmetric(4),
    "IQ4_NL": store_iq4_nl,
    "Q8_KV": store_q8_kv,
}

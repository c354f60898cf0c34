"""Scales of a whole block at a time, for types whose blocks have many.

A unit spends more time on the scales of its 32 elements than on their codes. For the types here,
`prepare(row, block, buffer)` writes the scales of a block as floats, and what is subtracted after
them, `MINIMA` bytes on; a unit then loads them. Its values are those of the unit in `UNITS`, bit
for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....formats.kernel import from_source, inlined_function
from .. import vectors as v
from ..vectors import as_floats, bit_and, bit_or, load_bytes, mul, plus, shift_right, signed, splat
from . import grid, iq_k, iq_ks, k

BUFFER = 128  # bytes
MINIMA = 64

_ONE = """\
def {name}(row, block, unit, buffer):
    low, high = values(row, block, unit)
    scale = v.splat(v.float_at(buffer + 4 * unit))
    return v.mul(scale, low), v.mul(scale, high)
"""
_TWO = """\
def {name}(row, block, unit, buffer):
    low, high = values(row, block, unit)
    first, second = v.float_at(buffer + 8 * unit), v.float_at(buffer + 8 * unit + 4)
    return v.mul(v.splat(first), low), v.mul(v.splat(second), high)
"""
_WITH_MINIMUM = """\
def {name}(row, block, unit, buffer):
    low, high = values(row, block, unit)
    scale = v.splat(v.float_at(buffer + 4 * unit))
    m = v.splat(v.float_at(buffer + MINIMA + 4 * unit))
    return v.sub(v.mul(scale, low), m), v.sub(v.mul(scale, high), m)
"""
_ALONE = """\
def {name}(row, block, unit, buffer):
    return values(row, block, unit)
"""


@inlined_function
def _in_order(at):
    """Nibbles of eight bytes, those of each byte one after the other."""
    codes = load_bytes(at)  # the last eight do not count
    return v.interleaved_lower(bit_and(codes, 15), shift_right(codes, 4))


@inlined_function
def _scaled(d, codes):
    return mul(splat(d), as_floats(signed(codes)))


def _six_bits_and_minima(row, block, buffer):
    """Q4_K and Q5_K: see `formats.codecs.k`, with four bytes at a time."""
    a, b, c = v.long_at(block + 4), v.long_at(block + 8), v.long_at(block + 12)
    scales = a & 0x3F3F3F3F | ((c & 0x0F0F0F0F) | (a >> 6 & 0x03030303) << 4) << 32
    minima = b & 0x3F3F3F3F | ((c >> 4 & 0x0F0F0F0F) | (b >> 6 & 0x03030303) << 4) << 32
    v.store_floats(buffer, mul(splat(v.half_at(block)), as_floats(v.bytes_of(scales))))
    minima = mul(splat(v.half_at(block + 2)), as_floats(v.bytes_of(minima)))
    v.store_floats(buffer + MINIMA, minima)


def _q6_k(row, block, buffer):
    v.store_floats(buffer, _scaled(v.half_at(block + 208), load_bytes(block + 192)))


def _iq2_k(row, block, buffer):
    v.store_floats(buffer, _scaled(v.half_at(block), plus(_in_order(block + 4), -8)))


def _iq3_k(row, block, buffer):
    nibbles = _in_order(block + 6)
    magnitudes = as_floats(plus(v.shift_left(nibbles, 1), 1))
    scales = v.negate_where(magnitudes, v.word_at(block + 4))
    v.store_floats(buffer, mul(splat(v.half_at(block)), scales))


def _iq4_k(row, block, buffer):
    """IQ4_K and IQ5_K."""
    high = v.shift_left(v.pairs_in_order(v.long_at(block + 4)), 4)
    codes = plus(bit_or(_in_order(block + 8), high), -32)
    v.store_floats(buffer, _scaled(v.half_at(block), codes))


def _iq6_k(row, block, buffer):
    v.store_floats(buffer, _scaled(v.half_at(block), load_bytes(block + 4)))


def _iq2_ks(row, block, buffer):
    fifth = v.where_bits(v.word_at(block) >> 8, 16)
    codes = plus(bit_or(_in_order(block + 2), fifth), -16)
    v.store_floats(buffer, _scaled(v.half_at(row), codes))


def _iq4_ks(row, block, buffer):
    codes = v.as_integers(bit_and(load_bytes(block), 254))
    v.store_floats(buffer, mul(splat(v.float_at(row)), as_floats(plus(codes, -127))))


def _iq4_xs(row, block, buffer):
    high = v.shift_left(v.pairs_in_order(v.word_at(block + 2)), 4)
    codes = plus(bit_or(_in_order(block + 4), high), -32)
    v.store_floats(buffer, _scaled(v.half_at(block), codes))


def _nothing(row, block, buffer):
    return


class Prepared(NamedTuple):
    """How a type is read with prepared scales: the source of its unit, and functions."""

    source: str
    values: Any
    prepare: Any


_PREPARED = {
    "Q4_K": Prepared(_WITH_MINIMUM, k.q4_k_values, _six_bits_and_minima),
    "Q5_K": Prepared(_WITH_MINIMUM, k.q5_k_values, _six_bits_and_minima),
    "Q6_K": Prepared(_TWO, k.q6_k_values, _q6_k),
    "IQ2_K": Prepared(_TWO, iq_k.iq2_k_values, _iq2_k),
    "IQ3_K": Prepared(_TWO, iq_k.iq3_k_values, _iq3_k),
    "IQ4_K": Prepared(_TWO, iq_k.iq4_k_values, _iq4_k),
    "IQ5_K": Prepared(_TWO, iq_k.iq5_k_values, _iq4_k),
    "IQ6_K": Prepared(_TWO, iq_k.iq6_k_values, _iq6_k),
    "IQ2_KS": Prepared(_ONE, iq_ks.iq2_ks_values, _iq2_ks),
    "IQ4_KS": Prepared(_ONE, iq_ks.iq4_ks_values, _iq4_ks),
    "IQ4_XS": Prepared(_ONE, grid.iq4_xs_values, _iq4_xs),
}


def prepared(name: str, unit: Any) -> tuple[Any, Any]:
    """Return `prepare` and the unit with a buffer of a type; its `unit` is called by types that
    have nothing to prepare.
    """
    found = _PREPARED.get(name) or Prepared(_ALONE, unit, _nothing)
    of_type = f"{name.lower()}_with_buffer"
    names = {"values": found.values, "v": v, "MINIMA": MINIMA}
    with_buffer = from_source(
        found.source.format(name=of_type), of_type, __file__, names, inline=True
    )
    return inlined_function(found.prepare), with_buffer

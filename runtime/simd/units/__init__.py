"""Decoding of 32 elements in vectors, one function per type."""

from . import grid, iq_k, iq_ks, k, plain, ternary, trellis

UNITS = (
    plain.UNITS | k.UNITS | iq_k.UNITS | iq_ks.UNITS | grid.UNITS | trellis.UNITS | ternary.UNITS
)

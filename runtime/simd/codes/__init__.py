"""Codes of types in 8 bits without sign, and their scales, for products in integers.

A type has a pair of functions that build instructions. `scales(w, row, at)` gives the `Scales` of
the 256 elements whose first block is at `at` in the row at `row`; `codes(w, row, at, step)` gives
64 of their codes, bytes, in order. The value of an element is factor * code + shift, with the
factor and the shift of its group of 16.
"""

from . import grid, iq_k, k, plain, ternary, trellis

CODES = plain.CODES | k.CODES | iq_k.CODES | grid.CODES | trellis.CODES | ternary.CODES

"""The layout of weights in device memory: the bits of the file, moved so that a warp reads them in
wide, adjacent accesses, some of them inverted.

A packed matrix has its blocks' fields in planes: all codes together, all scales together, ... Plane
p of a matrix of `rows` x `blocks` blocks begins where the one before it ends, rounded up to 256
bytes, and holds, row by row and block by block, `bytes` bytes per block; a plane of row headers
holds them per row. Within a plane the bits of a block are in the best order for its unpacking
function, but each run of 32 elements (a *unit*) has its codes together, aligned to their size.

How a type is added (one line of data here, one struct there):

1. In a file of this folder: `"IQ4_K": BlockLayout((("codes", 128), ("scales", 16)), fields)`, where
   `fields(i)` lists, for the elements i of a block (int[n, 1] or so; numbers broadcast), (bits in
   the stored block, plane, bits in that plane's bytes of the block); with FLIPPED after them the
   last bit is inverted, which makes codes around the middle of their range two's complement.
   Helpers for bits are those of `formats/codecs/bit_moves.py` and `nibbles` ... `singles_by_byte`
   below. The map must name every stored bit once: this is checked when it is built; places that no
   bit goes to are padding and become 0. Block length, bytes and row header come from
   `formats.types`. The interleaving of rows is undone before. Only interleaved types without a
   plain type need a layout, and those whose rows decode to other bits than the plain type's.
2. In a header of `units/`: `struct IQ4_K : layout::IQ4_K {...}` with `load` and `unpack` (contract:
   `units/common.cuh`). Its facts about the layout (BLOCK, plane numbers, bytes, `geometry()`) are
   in the generated `units/geometry.cuh`. The header has the name of the module with the layout.
   That gives the type all kernels, those of decoding steps too. They get faster by what the unit
   may say of products: LESS, SECOND, PARTS, SPREAD, SIZES in `units/common.cuh`.
3. `tests/test_units.py` finds it there, and compares it with `formats.codecs.codec.decode` bit by
   bit, on the CPU (by g++) and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...formats.codecs.bit_moves import bits

UNIT = 32  # elements


def nibbles(i) -> np.ndarray:
    """4 bits per element, 16 bytes per unit: element e at nibble e, low first. Selectors for byte
    permutation, eight to a word.
    """
    return bits(i // 2, 4 * (i % 2), 4)


def nibbles_by_byte(i) -> np.ndarray:
    """4 bits per element, 16 bytes per unit: a word's low nibbles are 4 elements, byte for byte,
    its high nibbles the next 4.
    """
    return bits(i // 8 * 4 + i % 4, i % 8 // 4 * 4, 4)


def pairs(i) -> np.ndarray:
    """2 bits per element, 8 bytes per unit: a word's nibbles hold 8 elements in their low bits, and
    the next 8 in their high bits.
    """
    return bits(i // 16 * 4 + i % 8 // 2, 4 * (i % 2) + i % 16 // 8 * 2, 2)


def pairs_by_byte(i) -> np.ndarray:
    """2 bits per element, 8 bytes per unit: bits 2k of a word's bytes are the elements 4k to 4k + 3
    of its 16.
    """
    return bits(i // 16 * 4 + i % 4, i % 16 // 4 * 2, 2)


def singles(i) -> np.ndarray:
    """1 bit per element, 4 bytes per unit: bit k of the word's nibbles are the elements 8k to 8k +
    7.
    """
    return bits(i // 32 * 4 + i % 8 // 2, 4 * (i % 2) + i % 32 // 8, 1)


def singles_by_byte(i) -> np.ndarray:
    """1 bit per element, 4 bytes per unit: bit k of the word's bytes are elements 4k to 4k + 3."""
    return bits(i // 32 * 4 + i % 4, i % 32 // 4, 1)


@dataclass(frozen=True)
class BlockLayout:
    """planes: (name, bytes per block) in order; `fields` as above. header_bytes: how many of a
    row's header are kept (None: all). spread: the unit has SPREAD (`units/common.cuh`): where
    activations are few, each is in four bytes. signed: the unit has SIZES: where they are few, they
    are there negated, too.
    """

    planes: tuple[tuple[str, int], ...]
    fields: Callable[[np.ndarray], list[tuple]]
    header_bytes: int | None = None
    spread: bool = False
    signed: bool = False

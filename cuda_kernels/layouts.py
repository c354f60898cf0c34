"""How weights lie in device memory: the bits of the file, moved so that a warp reads them wide and side by side, some of them inverted.

A packed matrix has its blocks' fields in planes: all codes together, all scales together, ... Plane p of a matrix of `rows` x `blocks`
blocks begins where the one before it ends, rounded up to 256 bytes, and holds, row by row and block by block, `bytes` bytes per block;
a plane of row headers holds them per row. Within a plane the bits of a block stand as its unpacking function likes them best, but
always so that each run of 32 elements (a *unit*) has its codes together, aligned to their size.

How a type is added (one line of data here, one struct there):

1. In a file of `layout_families/`: `"IQ4_K": Layout((("codes", 128), ("scales", 16)), fields)`, where `fields(i)` lists, for the
   elements i of a block (int[n, 1] or so; numbers broadcast), (bits in the stored block, plane, bits in that plane's bytes of the block);
   with FLIPPED behind them the last bit is inverted, which makes codes around the middle of their range two's complement. Helpers for
   bits are those of `formats/codecs/bit_moves.py` and `nibbles` ... `singles_by_byte` below. The map must name every stored bit once:
   this is checked when it is built; places that no bit goes to are padding and become 0. Block length, bytes and row header come from
   `formats.types`. Row-interleaved types are undone before: only those without a plain type need a layout, and those whose rows decode to
   other bits than the plain type's.
2. In a header of `units/`: `struct IQ4_K : layout::IQ4_K {...}` with `load` and `unpack` (contract: `units/common.cuh`). What it knows
   of the layout (BLOCK, plane numbers, bytes, `geometry()`) is in the generated `units/geometry.cuh`. The header has the name of the
   module with the layout.
3. `tests/test_units.py` finds it there, and compares it with `formats.codec.decode` bit by bit, on the CPU (by g++) and on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..formats.codecs.bit_moves import FLIPPED, Moves, bits
from ..formats.types import GGMLType, ggml_type

ALIGNMENT = 256  # of planes, in bytes
UNIT = 32  # elements
HEADER = "header"  # the name of the plane of row headers


def nibbles(i) -> np.ndarray:
    """4 bits per element, 16 bytes per unit: element e at nibble e, low first. Selectors for byte permutation, eight to a word."""
    return bits(i // 2, 4 * (i % 2), 4)


def nibbles_by_byte(i) -> np.ndarray:
    """4 bits per element, 16 bytes per unit: a word's low nibbles are 4 elements, byte for byte, its high nibbles the next 4."""
    return bits(i // 8 * 4 + i % 4, i % 8 // 4 * 4, 4)


def pairs(i) -> np.ndarray:
    """2 bits per element, 8 bytes per unit: a word's nibbles hold 8 elements in their low bits, and the next 8 in their high bits."""
    return bits(i // 16 * 4 + i % 8 // 2, 4 * (i % 2) + i % 16 // 8 * 2, 2)


def pairs_by_byte(i) -> np.ndarray:
    """2 bits per element, 8 bytes per unit: bits 2k of a word's bytes are the elements 4k to 4k + 3 of its 16."""
    return bits(i // 16 * 4 + i % 4, i % 16 // 4 * 2, 2)


def singles(i) -> np.ndarray:
    """1 bit per element, 4 bytes per unit: bit k of the word's nibbles are the elements 8k to 8k + 7."""
    return bits(i // 32 * 4 + i % 8 // 2, 4 * (i % 2) + i % 32 // 8, 1)


def singles_by_byte(i) -> np.ndarray:
    """1 bit per element, 4 bytes per unit: bit k of the word's bytes are the elements 4k to 4k + 3."""
    return bits(i // 32 * 4 + i % 4, i % 32 // 4, 1)


@dataclass(frozen=True)
class Layout:
    """planes: (name, bytes per block) in order; `fields` as above. header_bytes: how many of a row's header are kept (None: all)."""

    planes: tuple[tuple[str, int], ...]
    fields: Callable[[np.ndarray], list[tuple]]
    header_bytes: int | None = None


@dataclass(frozen=True)
class PackedLayout:
    """A layout with its type: planes (name, bytes, whether per row instead of per block) and the moves from a stored block to the
    planes' bytes of it, one plane after the other."""

    type: GGMLType
    planes: tuple[tuple[str, int, bool], ...]
    moves: Moves = field(repr=False, compare=False, hash=False)

    @property
    def packed_bytes(self) -> int:
        """Of one block, without row headers."""
        return sum(n for _, n, per_row in self.planes if not per_row)

    def offsets(self, rows: int, cols: int) -> list[int]:
        """Where each plane of a matrix begins, and behind them the size of the whole."""
        blocks, at = cols // self.type.block_size, [0]
        for _, n, per_row in self.planes:
            at.append(at[-1] + -(-(rows * n * (1 if per_row else blocks)) // ALIGNMENT) * ALIGNMENT)
        return at


@functools.cache
def _layouts() -> dict[str, Layout]:
    from .layout_families import FAMILIES

    merged: dict[str, Layout] = {}
    for family in FAMILIES:
        if twice := merged.keys() & family.LAYOUTS.keys():
            raise RuntimeError(f"two layouts for {', '.join(sorted(twice))}")
        merged |= family.LAYOUTS
    return merged


def unit_header(type: GGMLType) -> str:
    """The header of `units/` that has the unit of a type: named as the module with its layout."""
    from .layout_families import FAMILIES

    return next(f"units/{family.__name__.rpartition('.')[2]}.cuh" for family in FAMILIES if type.name in family.LAYOUTS)


def packed_types() -> list[str]:
    """Names of the types that have a layout of their own."""
    return list(_layouts())


@functools.cache
def packed_layout(type: GGMLType) -> PackedLayout:
    """The layout of a type (not of an interleaved one that has a plain type: take that). RuntimeError if it loses or doubles a bit."""
    declared = _layouts()[type.name]
    starts = dict(zip((name for name, _ in declared.planes), np.cumsum([0] + [n for _, n in declared.planes]).tolist()))
    source, target, flipped = [], [], [np.zeros(0, dtype=np.int64)]
    for stored, plane, packed, *kind in declared.fields(np.arange(type.block_size)):
        stored, packed = np.broadcast_arrays(stored, packed + 8 * starts[plane])
        source.append(stored.ravel())
        target.append(packed.ravel())
        if kind == [FLIPPED]:
            flipped.append(packed[..., -1].ravel())
        elif kind:
            raise RuntimeError(f"the layout of {type.name} has a field that is {kind[0]!r}: bits are moved or inverted, nothing else")
    pairs_of_bits = np.unique(np.stack([np.concatenate(source), np.concatenate(target)]), axis=1)  # shared fields come once per element
    n_bytes = sum(n for _, n in declared.planes)
    if not np.array_equal(pairs_of_bits[0], np.arange(8 * type.block_bytes)):
        raise RuntimeError(f"the layout of {type.name} must have one place for every bit")
    if len(np.unique(pairs_of_bits[1])) != pairs_of_bits.shape[1] or pairs_of_bits[1].max() >= 8 * n_bytes:
        raise RuntimeError(f"the layout of {type.name} puts two bits in one place, or one outside its planes")
    head = type.header_bytes if declared.header_bytes is None else declared.header_bytes
    planes = tuple((name, n, False) for name, n in declared.planes) + (((HEADER, head, True),) if head else ())
    return PackedLayout(type, planes, Moves.of_bits(*pairs_of_bits, n_bytes, np.concatenate(flipped)))


def plain_type(type: str | GGMLType) -> GGMLType:
    """The type whose layout a matrix of `type` has on a device: what an interleaved type is undone to, or itself."""
    type = ggml_type(type)
    return type if type.name in _layouts() or type.base is None else plain_type(type.base)


def geometry_header() -> str:
    """The text of `units/geometry.cuh`: for each type a struct with its block length, planes and where they begin."""
    return "// Written by cuda_kernels/layouts.py from the table of types and the layouts.\nnamespace layout {\n" + "".join(
        _struct(packed_layout(ggml_type(name))) for name in packed_types()) + "}\n"


def _struct(layout: PackedLayout) -> str:
    lines = [f"struct {layout.type.name} {{", f"  static constexpr int BLOCK = {layout.type.block_size};"]
    offset, body = "0", []
    for n, (name, n_bytes, per_row) in enumerate(layout.planes):
        lines.append(f"  static constexpr int {name.upper()}_PLANE = {n}, {name.upper()}_BYTES = {n_bytes};"
                     f"  // per {'row' if per_row else 'block'}")
        body.append(f"    g.plane[{n}] = {offset};")
        offset = f"g.plane[{n}] + align_plane({'rows' if per_row else 'rows * g.blocks'} * {n_bytes})"
    lines.append(f"  static constexpr int PLANES = {len(layout.planes)};")
    for name, kind, values in (("plane_bytes", "int", [n for _, n, _ in layout.planes]),
                               ("plane_per_row", "bool", [r for *_, r in layout.planes])):
        chosen = "".join(f"p == {n} ? {str(v).lower()} : " for n, v in enumerate(values[:-1])) + str(values[-1]).lower()
        lines.append(f"  static __host__ __device__ constexpr {kind} {name}(int p) {{ return {chosen}; }}")
    return "\n".join(lines + [
        "  static __host__ __device__ Geometry geometry(int64_t rows, int cols) {", "    Geometry g;",
        f"    g.blocks = cols / {layout.type.block_size};", f"    g.units = cols / {UNIT};", *body, "    return g;", "  }", "};", ""])

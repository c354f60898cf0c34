"""The table of layouts: each type's layout, checked bit by bit, and the header that gives the
kernels its geometry.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from ...formats.codecs.bit_moves import FLIPPED, Moves
from ...formats.types import GGMLType, ggml_type
from . import floats, fp4, grid, grid_ternary, iq_k, iq_ks, k, legacy, q8, ternary, trellis
from .layout import UNIT, BlockLayout

FAMILIES = (floats, legacy, fp4, k, grid, grid_ternary, ternary, iq_k, iq_ks, trellis, q8)
ALIGNMENT = 256  # of planes, in bytes
HEADER = "header"  # the name of the plane of row headers


@dataclass(frozen=True)
class PackedLayout:
    """A layout with its type: planes (name, bytes, whether per row instead of per block) and the
    moves from a stored block to the planes' bytes of it, one plane after the other.
    """

    type: GGMLType
    planes: tuple[tuple[str, int, bool], ...]
    moves: Moves = field(repr=False, compare=False, hash=False)

    @property
    def packed_bytes(self) -> int:
        """Return the packed bytes of one block, without row headers."""
        return sum(n for _, n, per_row in self.planes if not per_row)

    def offsets(self, rows: int, cols: int) -> list[int]:
        """Return where each plane of a matrix begins, followed by the size of the whole."""
        blocks, at = cols // self.type.block_size, [0]
        for _, n, per_row in self.planes:
            at.append(at[-1] + -(-(rows * n * (1 if per_row else blocks)) // ALIGNMENT) * ALIGNMENT)
        return at


@functools.cache
def _layouts() -> dict[str, BlockLayout]:
    merged: dict[str, BlockLayout] = {}
    for family in FAMILIES:
        if twice := merged.keys() & family.LAYOUTS.keys():
            raise RuntimeError(f"two layouts for {', '.join(sorted(twice))}")
        merged |= family.LAYOUTS
    return merged


def unit_header(type: GGMLType) -> str:
    """Return the header of `units/` with the unit of a type. It has the name of the module with the
    layout.
    """
    return next(
        f"units/{family.__name__.rpartition('.')[2]}.cuh"
        for family in FAMILIES
        if type.name in family.LAYOUTS
    )


def spread_type(type: GGMLType) -> bool:
    """Return whether the unit of a type has SPREAD."""
    return _layouts()[type.name].spread


def signed_type(type: GGMLType) -> bool:
    """Return whether the unit of a type has SIZES."""
    return _layouts()[type.name].signed


def packed_types() -> list[str]:
    """Return the names of the types that have their own layout."""
    return list(_layouts())


@functools.cache
def packed_layout(type: GGMLType) -> PackedLayout:
    """Return the layout of a type (not of an interleaved one that has a plain type: take that).
    Raise RuntimeError if it loses or doubles a bit.
    """
    declared = _layouts()[type.name]
    starts = dict(
        zip(
            (name for name, _ in declared.planes),
            np.cumsum([0] + [n for _, n in declared.planes]).tolist(),
        )
    )
    source, target, flipped = [], [], [np.zeros(0, dtype=np.int64)]
    for stored, plane, packed, *kind in declared.fields(np.arange(type.block_size)):
        stored, packed = np.broadcast_arrays(stored, packed + 8 * starts[plane])
        source.append(stored.ravel())
        target.append(packed.ravel())
        if kind == [FLIPPED]:
            flipped.append(packed[..., -1].ravel())
        elif kind:
            raise RuntimeError(
                f"the layout of {type.name} has a field that is {kind[0]!r}: bits are moved or"
                " inverted, nothing else"
            )
    # Shared fields come once per element.
    pairs_of_bits = np.unique(np.stack([np.concatenate(source), np.concatenate(target)]), axis=1)
    n_bytes = sum(n for _, n in declared.planes)
    if not np.array_equal(pairs_of_bits[0], np.arange(8 * type.block_bytes)):
        raise RuntimeError(f"the layout of {type.name} must have one place for every bit")
    if (
        len(np.unique(pairs_of_bits[1])) != pairs_of_bits.shape[1]
        or pairs_of_bits[1].max() >= 8 * n_bytes
    ):
        raise RuntimeError(
            f"the layout of {type.name} puts two bits in one place, or one outside its planes"
        )
    head = type.header_bytes if declared.header_bytes is None else declared.header_bytes
    planes = tuple((name, n, False) for name, n in declared.planes) + (
        ((HEADER, head, True),) if head else ()
    )
    stored, packed = pairs_of_bits
    moves = Moves.of_bits(stored, packed, n_bytes, np.concatenate(flipped))
    return PackedLayout(type, planes, moves)


def plain_type(type: str | GGMLType) -> GGMLType:
    """Return the type whose layout a matrix of `type` has on a device: the plain type of an
    interleaved one, or itself.
    """
    type = ggml_type(type)
    return type if type.name in _layouts() or type.base is None else plain_type(type.base)


def geometry_header() -> str:
    """Return the text of `units/geometry.cuh`: for each type a struct with its block length, planes
    and where they begin.
    """
    return (
        "// Written by cuda_kernels/layouts/table.py from the table of types and the"
        " layouts.\nnamespace layout {\n"
        + "".join(_struct(packed_layout(ggml_type(name))) for name in packed_types())
        + "}\n"
    )


def _struct(layout: PackedLayout) -> str:
    lines = [
        f"struct {layout.type.name} {{",
        f"  static constexpr int BLOCK = {layout.type.block_size};",
    ]
    offset, body = "0", []
    for n, (name, n_bytes, per_row) in enumerate(layout.planes):
        lines.append(
            f"  static constexpr int {name.upper()}_PLANE = {n}, {name.upper()}_BYTES = {n_bytes};"
            f"  // per {'row' if per_row else 'block'}"
        )
        body.append(f"    g.plane[{n}] = {offset};")
        offset = (
            f"g.plane[{n}] + align_plane({'rows' if per_row else 'rows * g.blocks'} * {n_bytes})"
        )
    lines.append(f"  static constexpr int PLANES = {len(layout.planes)};")
    for name, kind, values in (
        ("plane_bytes", "int", [n for _, n, _ in layout.planes]),
        ("plane_per_row", "bool", [r for *_, r in layout.planes]),
    ):
        chosen = (
            "".join(f"p == {n} ? {str(v).lower()} : " for n, v in enumerate(values[:-1]))
            + str(values[-1]).lower()
        )
        lines.append(
            f"  static __host__ __device__ constexpr {kind} {name}(int p) {{ return {chosen}; }}"
        )
    return "\n".join(
        lines
        + [
            "  static __host__ __device__ Geometry geometry(int64_t rows, int cols) {",
            "    Geometry g;",
            f"    g.blocks = cols / {layout.type.block_size};",
            f"    g.units = cols / {UNIT};",
            *body,
            "    return g;",
            "  }",
            "};",
            "",
        ]
    )

"""How many elements of a matrix-vector product a lane takes at once, and the shared memory that
weights and activations take.
"""

from __future__ import annotations

from ...formats.types import GGMLType
from ..compile.grids import shared_bytes
from ..compile.occupancy import RESERVED
from ..layouts.table import packed_layout

# Elements that a lane takes at once, G of the formats; 32 for all others.
_GRANULE = {
    "F32": 4,
    "F16": 8,
    "BF16": 8,
    "Q8_0": 16,
    "IQ2_K": 64,
}


def granule(type: GGMLType) -> int:
    """Return the elements that a lane takes at once."""
    return _GRANULE.get(type.name, 32)


def stage_bytes(type: GGMLType, cols: int, stage_steps: int, joined: bool = False) -> int:
    """Shared memory for a stage of one row: Ring::ROW of matvec/ring.cuh."""
    total, elements = 0, cols if joined else stage_steps * 32 * granule(type)
    for _, n, per_row in packed_layout(type).planes:
        if per_row:  # ROW_FACTOR of the formats; HEADER_STAGED: the 16 bytes that have it
            total += 16 if n == 2 else 0
            continue
        piece, row = elements // type.block_size * n, cols // type.block_size * n
        aligned = row % 16 == 0 and piece % 16 == 0
        total += piece if aligned else -(-piece // 16) * 16 + 16
    return total


def activation_bytes(
    type: GGMLType, steps: int, spread: bool = False, negated: bool = False
) -> int:
    """Return the bytes of a row of activations, Activations::BYTES of matvec/common.cuh: float32
    for a type of floats, else 8 bits; each is there four times if `spread`, twice if `negated`.
    """
    if type.is_float:
        return 32 * steps * granule(type) * 4
    of_one, record = granule(type), 16 if granule(type) == 32 else 8
    return 32 * steps * (of_one * (4 if spread else 2 if negated else 1) + record)


def shared_space_of(type: GGMLType, limit: int) -> int:
    """Return how many bytes of shared memory a plan for the type can have, of the `limit` of a
    block: some types have a table there.
    """
    return limit - RESERVED - shared_bytes(type)

"""The table of ggml types: all tensor storage types of GGUF files, in one place.

Columns: id, block length (elements), bytes per block, bytes of row header, rows per interleaved
group, the plain type whose rows are interleaved (None if it has none), and the spelling used by
per-tensor flags. Sources: `ggml.h` and `ggml-common.h` of ik_llama.cpp (2026-08) and llama.cpp
(2026-10); ids above 96 exist in ik_llama.cpp only. Nothing else in the tree repeats these numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..errors import ShapeError, UnknownTypeError


@dataclass(frozen=True)
class GGMLType:
    """One storage type. A row of n elements takes `header_bytes + n / block_size * block_bytes`
    bytes.
    """

    name: str
    id: int
    block_size: int
    block_bytes: int
    header_bytes: int = 0
    group_rows: int = 1
    base: str | None = None
    type_name: str = ""
    tail_bytes: int = 0  # bytes after the last row of a tensor (I2_S keeps its scale there)

    @property
    def is_float(self) -> bool:
        """Whether it is F32, F16, BF16 or F64."""
        return self.name in ("F32", "F16", "BF16", "F64")

    @property
    def is_integer(self) -> bool:
        """Whether it is I8, I16, I32 or I64."""
        return self.name in ("I8", "I16", "I32", "I64")

    @property
    def is_quantized(self) -> bool:
        """Whether it is neither a float nor an integer type."""
        return not self.is_float and not self.is_integer

    @property
    def is_interleaved(self) -> bool:
        """Whether groups of rows are stored together."""
        return self.group_rows > 1

    @cached_property
    def bits_per_weight(self) -> float:
        """Bits per element, without row headers."""
        return 8 * self.block_bytes / self.block_size

    @property
    def needs_importance(self) -> bool:
        """Return whether the reference quantizes to the type with an importance matrix only."""
        return (self.base or self.name) in _NEED_IMPORTANCE

    @property
    def row_multiple(self) -> int:
        """The number that row lengths are a multiple of: the block and, where single elements are
        interleaved, the pairs they move in.
        """
        return max(self.block_size, 2 if self.is_interleaved else 1)

    def row_bytes(self, n_cols: int) -> int:
        """Return the bytes of one row of `n_cols` elements. Raise ShapeError if n_cols is not a
        multiple of the block length.
        """
        if n_cols <= 0 or n_cols % self.block_size:
            raise ShapeError(
                f"row length {n_cols} is not a multiple of {self.block_size}, the block length of"
                f" {self.name}"
            )
        return self.header_bytes + n_cols // self.block_size * self.block_bytes

    @property
    def plain(self) -> GGMLType:
        """The type with the same blocks in plain rows: the type itself unless it is interleaved."""
        return self if self.base is None else TYPES[self.base]

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor with the numpy-order `shape` (row length last). Raise
        ShapeError if the type cannot hold it.
        """
        rows = shape[:-1]
        rows_per_matrix = rows[-1] if rows else 1
        if rows_per_matrix % self.group_rows:
            raise ShapeError(
                f"{rows_per_matrix} rows are not a multiple of {self.group_rows}, the row group of"
                f" {self.name}"
            )
        return math.prod(rows) * self.row_bytes(shape[-1]) + self.tail_bytes

    def __str__(self) -> str:
        return self.name


def _plain(
    name: str,
    id: int,
    block_size: int,
    block_bytes: int,
    header: int = 0,
    spelled: str = "",
    tail: int = 0,
):
    return GGMLType(
        name, id, block_size, block_bytes, header, 1, None, spelled or name.lower(), tail
    )


def _rows(
    name: str,
    id: int,
    group: int,
    base: str | None,
    geometry: tuple[int, int],
    header: int = 0,
    spelled: str = "",
):
    return GGMLType(name, id, *geometry, header, group, base, spelled or name.lower())


_TABLE = [
    _plain("F32", 0, 1, 4),
    _plain("F16", 1, 1, 2),
    _plain("BF16", 30, 1, 2),
    _plain("F64", 28, 1, 8),
    _plain("I8", 24, 1, 1),
    _plain("I16", 25, 1, 2),
    _plain("I32", 26, 1, 4),
    _plain("I64", 27, 1, 8),
    # legacy blocks
    _plain("Q4_0", 2, 32, 18),
    _plain("Q4_1", 3, 32, 20),
    _plain("Q5_0", 6, 32, 22),
    _plain("Q5_1", 7, 32, 24),
    _plain("Q8_0", 8, 32, 34),
    _plain("Q6_0", 133, 32, 26),
    _plain("IQ4_NL", 20, 32, 18),
    _plain("MXFP4", 39, 32, 17),
    _plain("NVFP4", 40, 64, 36),
    _plain("Q1_0_G128", 41, 128, 18),
    _plain("Q2_0", 42, 64, 18),
    # K-quants
    _plain("Q2_K", 10, 256, 84, spelled="q2_K"),
    _plain("Q3_K", 11, 256, 110, spelled="q3_K"),
    _plain("Q4_K", 12, 256, 144, spelled="q4_K"),
    _plain("Q5_K", 13, 256, 176, spelled="q5_K"),
    _plain("Q6_K", 14, 256, 210, spelled="q6_K"),
    # codebook i-quants
    _plain("IQ2_XXS", 16, 256, 66),
    _plain("IQ2_XS", 17, 256, 74),
    _plain("IQ3_XXS", 18, 256, 98),
    _plain("IQ1_S", 19, 256, 50),
    _plain("IQ3_S", 21, 256, 110),
    _plain("IQ2_S", 22, 256, 82),
    _plain("IQ4_XS", 23, 256, 136),
    _plain("IQ1_M", 29, 256, 56),
    # ternary
    _plain("TQ1_0", 34, 256, 54),
    _plain("TQ2_0", 35, 256, 66),
    _plain("I2_S", 36, 4, 1, tail=32),
    _plain("IQ1_BN", 134, 64, 13, 2),
    _plain("IQ2_BN", 135, 64, 16, 4),
    # IQ_K and IQ_KS
    _plain("IQ2_K", 137, 256, 76),
    _plain("IQ3_K", 138, 256, 110),
    _plain("IQ4_K", 139, 256, 144),
    _plain("IQ5_K", 140, 256, 176),
    _plain("IQ6_K", 141, 256, 212),
    _plain("IQ4_KS", 144, 256, 136, 4),
    _plain("IQ2_KS", 145, 256, 70, 2),
    _plain("IQ4_KSS", 146, 256, 128, 4),
    _plain("IQ5_KS", 152, 256, 168, 4),
    _plain("IQ3_KS", 156, 256, 102, 2),
    _plain("IQ2_KL", 157, 256, 86, 2),
    _plain("Q8_KV", 151, 32, 32, 8, spelled="q8_KV"),
    # trellis
    _plain("IQ2_KT", 153, 256, 68, 4),
    _plain("IQ3_KT", 154, 256, 100, 4),
    _plain("IQ4_KT", 155, 256, 128, 4),
    _plain("IQ1_KT", 158, 256, 56, 4),
    # row-interleaved
    _rows("Q4_0_4_4", 31, 4, "Q4_0", (32, 18), spelled="q4_0_4x4"),
    _rows("Q4_0_4_8", 32, 4, "Q4_0", (32, 18), spelled="q4_0_4x8"),
    _rows("Q4_0_8_8", 33, 8, "Q4_0", (32, 18), spelled="q4_0_8x8"),
    _rows("Q4_0_R8", 202, 8, "Q4_0", (32, 18)),
    _rows("Q5_0_R4", 206, 4, "Q5_0", (32, 22)),
    _rows("Q8_0_R8", 208, 8, "Q8_0", (32, 34)),
    _rows("Q6_0_R4", 233, 4, "Q6_0", (32, 26)),
    _rows("Q2_K_R4", 210, 4, "Q2_K", (256, 84)),
    _rows("Q3_K_R4", 211, 4, "Q3_K", (256, 110)),
    _rows("Q4_K_R4", 212, 4, "Q4_K", (256, 144)),
    _rows("Q5_K_R4", 213, 4, "Q5_K", (256, 176)),
    _rows("Q6_K_R4", 214, 4, "Q6_K", (256, 210)),
    _rows("IQ2_XXS_R4", 216, 4, "IQ2_XXS", (256, 66)),
    _rows("IQ2_XS_R4", 217, 4, "IQ2_XS", (256, 74)),
    _rows("IQ3_XXS_R4", 218, 4, "IQ3_XXS", (256, 98)),
    _rows("IQ1_S_R4", 219, 4, None, (32, 6), 2),
    _rows("IQ4_NL_R4", 220, 4, "IQ4_NL", (32, 18)),
    _rows("IQ3_S_R4", 221, 4, "IQ3_S", (256, 110)),
    _rows("IQ2_S_R4", 222, 4, "IQ2_S", (256, 82)),
    _rows("IQ4_XS_R8", 223, 8, "IQ4_XS", (256, 136)),
    _rows("IQ1_M_R4", 229, 4, None, (32, 7), 2),
    _rows("BF16_R16", 230, 16, "BF16", (1, 2)),
    _rows("IQ2_BN_R4", 335, 4, "IQ2_BN", (64, 16), 4),
    _rows("IQ2_K_R4", 337, 4, "IQ2_K", (256, 76)),
    _rows("IQ3_K_R4", 338, 4, "IQ3_K", (256, 110)),
    _rows("IQ4_K_R4", 339, 4, "IQ4_K", (256, 144)),
    _rows("IQ5_K_R4", 340, 4, "IQ5_K", (256, 176)),
    _rows("IQ4_KS_R4", 344, 4, "IQ4_KS", (256, 136), 4),
    _rows("IQ5_KS_R4", 352, 4, "IQ5_KS", (256, 168), 4),
    _rows("MXFP4_R8", 353, 8, "MXFP4", (32, 17)),
    _rows("Q8_K_R16", 397, 16, None, (256, 258)),
    _rows("Q8_KV_R8", 398, 8, "Q8_KV", (32, 32), 4, "q8_KV_r8"),
    _rows("Q8_K_R8", 399, 8, None, (256, 258)),
]

# Ids that were removed from the format, with the advice for a file that has them.
RETIRED_IDS = {
    4: "Q4_2, removed in 2023",
    5: "Q4_3, removed in 2023",
    37: "IQ4_NL_4_8, removed in 2025",
    38: "IQ4_NL_8_8, removed in 2025",
    142: "retired in ik_llama.cpp",
    143: "retired in ik_llama.cpp",
}

# Types of so few bits that llama-quantize of ik_llama.cpp refuses them without an importance
# matrix; their interleaved forms too. llama.cpp adds IQ3_XXS. (Q2_K is refused in one preset,
# Q2_K_S.)
_NEED_IMPORTANCE = frozenset(
    {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_KT", "IQ2_KT", "IQ1_S_R4", "IQ1_M_R4"}
)

TYPES: dict[str, GGMLType] = {t.name: t for t in _TABLE}
_BY_ID: dict[int, GGMLType] = {t.id: t for t in _TABLE}
_BY_SPELLING: dict[str, GGMLType] = {
    spelling.lower(): t for t in _TABLE for spelling in (t.name, t.type_name)
}
if len(TYPES) != len(_TABLE) or len(_BY_ID) != len(_TABLE):
    raise RuntimeError("the type table has a duplicate name or id")


def ggml_type(which: str | int | GGMLType) -> GGMLType:
    """Return the type with this name (`IQ4_K`, `iq4_k`, `q4_0_4x4`; any case) or id. Raise
    UnknownTypeError if there is none.
    """
    if isinstance(which, GGMLType):
        return which
    if isinstance(which, str):
        if found := _BY_SPELLING.get(which.lower()):
            return found
        raise UnknownTypeError(f"unknown ggml type '{which}'{_nearest(which)}")
    if (found := _BY_ID.get(which)) is not None:
        return found
    raise UnknownTypeError(f"ggml type id {which} is {RETIRED_IDS.get(which, 'unknown')}")


def _nearest(spelling: str) -> str:
    import difflib

    close = difflib.get_close_matches(spelling.upper(), TYPES, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""

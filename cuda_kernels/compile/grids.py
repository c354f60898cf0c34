"""Write headers with the codebooks as kernels read them, and with the constants of the trellis
types.

An entry of a codebook has a nibble per element, which chooses one of at most eight values (a
selector for byte permutation): a word for 8 elements, half a word for 4.
"""

from __future__ import annotations

import numpy as np

from ...formats import grids
from ...formats.types import GGMLType
from .tables import shared_lookup, words_function

_AS_THEY_ARE = {"value": (1, 0)}
# Name: (entries, tables of values: name, factor, addend). The vectors of IQ1 are moved by an eighth
# up or down.
_GRIDS = {
    "IQ2_XXS": (grids.IQ2_XXS_GRID, _AS_THEY_ARE),
    "IQ2_XS": (grids.IQ2_XS_GRID, _AS_THEY_ARE),
    "IQ2_S": (grids.IQ2_S_GRID, _AS_THEY_ARE),
    "IQ3_XXS": (grids.IQ3_XXS_GRID, _AS_THEY_ARE),
    "IQ3_S": (grids.IQ3_S_GRID, _AS_THEY_ARE),
    "IQ1": (grids.IQ1_S_GRID, {"more": (8, 1), "less": (8, -1)}),
}

_USERS = {name: name for name in _GRIDS} | dict.fromkeys(
    ("IQ1_S", "IQ1_M", "IQ1_S_R4", "IQ1_M_R4"), "IQ1"
)


def shared_bytes(type: GGMLType) -> int:
    """Return the bytes of static shared memory that a kernel takes for the table of a type, 0
    without a table. See prepare_unit in units/common.cuh.
    """
    if (name := _USERS.get(type.name)) is None:
        return 0
    entries = _GRIDS[name][0]
    return len(entries) * entries.shape[1] // 2


def grids_header() -> str:
    """Return the text of `units/grids.cuh`: for each codebook a struct NAME_GRID with

    value(n)        word n of its values (of IQ1: more(n) and less(n), eight times the values, and
                    one more or less)
    prepare(t, n)   brings the entries to shared memory; all n threads of a block call it, each with
                    its number t, and synchronize
    entry(i)        entry i, from there
    at(a)           the same at address() plus a number of bytes, ENTRY_BYTES for each; ALIGNED:
                    address() is a multiple of BYTES
    """
    return "// Written by cuda_kernels/compile/grids.py from formats/grids.py.\n" + "".join(
        _struct(name, *grid) for name, grid in _GRIDS.items()
    )


def trellis_header() -> str:
    """Return the text of `units/trellis_constants.cuh`."""
    # Its compiler is imported only where the constants are needed, as that takes a while.
    from ...formats.codecs import trellis

    constants = {"MULTIPLIER": trellis.MULTIPLIER % 2**32, "OFFSET": trellis.OFFSET}
    factors = {f"{name}_FACTOR": factor for name, factor in trellis.PRODUCT_FACTORS.items()}
    return (
        "// Written by cuda_kernels/compile/grids.py from formats/codecs/trellis.py.\n"
        "namespace trellis {\n"
        + "".join(f"constexpr uint32_t {name} = {value}u;\n" for name, value in constants.items())
        + "".join(
            f"constexpr float {name} = {np.float32(value)!s}f;\n" for name, value in factors.items()
        )
        + "}\n"
    )


def _struct(name: str, grid: np.ndarray, tables: dict[str, tuple[int, int]]) -> str:
    values = np.unique(grid)
    nibbles = np.searchsorted(values, grid).astype(np.uint64)
    entries = (nibbles << 4 * np.arange(grid.shape[1], dtype=np.uint64)).sum(axis=1)
    kind, words = (
        f"uint{4 * grid.shape[1]}_t",
        entries.astype(f"<u{grid.shape[1] // 2}").view("<u4"),
    )
    # To its size where that costs no padding: numbers of bytes are then put in by a logical or.
    alignment = 4 * len(words) if len(words) <= 256 else 16
    rows = ",\n".join(", ".join(f"{word:#x}u" for word in line) for line in words.reshape(-1, 16))
    padded = np.zeros(-(-len(values) // 4) * 4, dtype=np.int8)
    padded[: len(values)] = values
    functions = "".join(
        words_function(table, padded * factor + addend)
        for table, (factor, addend) in tables.items()
    )
    return f"""alignas(16) static __device__ const uint32_t {name}_ENTRIES[{len(words)}] = {{
{rows}}};
alignas({alignment}) static __shared__ uint32_t {name}_SHARED[{len(words)}];
struct {name}_GRID {{
  static constexpr bool ALIGNED = {str(alignment >= 4 * len(words)).lower()};
  static constexpr int BYTES = {4 * len(words)}, ENTRY_BYTES = {grid.shape[1] // 2};
{functions}  static __device__ __forceinline__ void prepare(int thread, int threads) {{
    const uint4* entries = reinterpret_cast<const uint4*>({name}_ENTRIES);
    for (int n = thread; n < {len(words) // 4}; n += threads)
      reinterpret_cast<uint4*>({name}_SHARED)[n] = entries[n];
  }}
  static __device__ __forceinline__ uint32_t entry(uint32_t index) {{
    return reinterpret_cast<const {kind}*>({name}_SHARED)[index];
  }}
{shared_lookup(name, kind)}}};
"""

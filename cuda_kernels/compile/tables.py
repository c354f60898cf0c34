"""Write a header with the value tables of the non-linear types as kernels read them: four signed
bytes to a word.
"""

from __future__ import annotations

import numpy as np

from ...formats import tables

# Name: (values, values of the second half or None).
_TABLES = {
    "IQ2NL": (tables.IQ2NL_VALUES[:4], tables.IQ2NL_VALUES[4:]),
    "IQ3NL": (tables.IQ3NL_VALUES[:8], tables.IQ3NL_VALUES[8:]),
    "IQ4NL": (tables.IQ4K_VALUES[:16], tables.IQ4K_VALUES[16:]),
    "IQ5NL": (tables.IQ5NL_VALUES[:32], tables.IQ5NL_VALUES[32:]),
    "IQ6NL": (tables.IQ6NL_VALUES[:64], tables.IQ6NL_VALUES[64:]),
    "FP4": (tables.FP4_VALUES, None),
    "IQ2KL_EVEN": (tables.IQ2KL_VALUES[:, 0], None),
    "IQ2KL_ODD": (tables.IQ2KL_VALUES[:, 1], None),
}


def tables_header() -> str:
    """Return the text of `units/tables.cuh`: NAME_TABLE::word(n) is word n of a table, second(n) of
    its second half.
    """
    return "// Written by cuda_kernels/compile/tables.py from formats/tables.py.\n" + "".join(
        f"struct {name}_TABLE {{\n  static constexpr int ENTRIES = {len(values)};\n"
        + words_function("word", values)
        + ("" if second is None else words_function("second", second))
        + "};\n"
        for name, (values, second) in _TABLES.items()
    )


def words_function(name: str, values: np.ndarray) -> str:
    """Return a static function `name(n)` that gives word n of the values: four signed bytes."""
    words = np.ascontiguousarray(values.astype(np.int8)).view("<u4")
    chosen = (
        "".join(f"n == {n} ? {word:#010x}u : " for n, word in enumerate(words[:-1]))
        + f"{words[-1]:#010x}u"
    )
    return f"  static __device__ constexpr uint32_t {name}(int n) {{ return {chosen}; }}\n"

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
    "FP4": (tables.FP4_VALUES, None),
    "IQ2KL_EVEN": (tables.IQ2KL_VALUES[:, 0], None),
    "IQ2KL_ODD": (tables.IQ2KL_VALUES[:, 1], None),
}


# Name: values and type of the entries of tables that kernels may also read in shared memory. With
# at most 128 bytes, lanes that read different words find them in different banks.
_SHARED = {
    "IQ2KL": (tables.IQ2KL_VALUES, "uint16_t"),
}


def tables_header() -> str:
    """Return the text of `units/tables.cuh`: NAME_TABLE::word(n) is word n of a table, second(n) of
    its second half. NAME_SHARED_TABLE is a table in shared memory, with prepare(t, n) as codebooks
    have it; at(a) is the entry at address() plus a number of bytes.
    """
    return (
        "// Written by cuda_kernels/compile/tables.py from formats/tables.py.\n"
        + _tables_of_words()
        + "".join(_shared_table(name, *table) for name, table in _SHARED.items())
    )


def _shared_table(name: str, values: np.ndarray, kind: str) -> str:
    words = np.ascontiguousarray(values.astype(np.int8)).ravel().view("<u4")
    listed = ", ".join(f"{word:#010x}u" for word in words)
    return f"""alignas(16) static __device__ const uint32_t {name}_WORDS[{len(words)}] = {{
{listed}}};
alignas(16) static __shared__ uint32_t {name}_SHARED[{len(words)}];
struct {name}_SHARED_TABLE {{
  static __device__ __forceinline__ void prepare(int thread, int threads) {{
    for (int n = thread; n < {len(words)}; n += threads) {name}_SHARED[n] = {name}_WORDS[n];
  }}
{shared_lookup(name, kind)}}};
"""


def shared_lookup(name: str, kind: str) -> str:
    """Return the functions of a table NAME_SHARED in shared memory: address(), and at(a), its entry
    of type `kind` at that address plus a number of bytes.
    """
    width = {"uint8_t": "u8", "uint16_t": "u16", "uint32_t": "u32"}[kind]
    return f"""\
#ifndef UNITS_ON_HOST
  static __device__ __forceinline__ uint32_t address() {{
    return uint32_t(__cvta_generic_to_shared({name}_SHARED));
  }}
  static __device__ __forceinline__ uint32_t at(uint32_t address) {{
    uint32_t v;
    asm("ld.shared.{width} %0, [%1];" : "=r"(v) : "r"(address));
    return v;
  }}
#else
  static uint32_t address() {{ return 0; }}
  static uint32_t at(uint32_t address) {{
    return *reinterpret_cast<const {kind}*>(
        reinterpret_cast<const uint8_t*>({name}_SHARED) + address);
  }}
#endif
"""


def _tables_of_words() -> str:
    return "".join(
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

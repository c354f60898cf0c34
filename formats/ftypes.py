"""The presets that a user can name: name, number for `general.file_type`, and the tensor type that
the preset starts from.

From llama-quantize of ik_llama.cpp (2026-08), with the additions of llama.cpp (2026-10). Several
presets share a starting type and differ by their mix; some are named after a type and start from
another (IQ2_S starts from IQ2_XS).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnknownTypeError
from .types import TYPES, GGMLType


@dataclass(frozen=True)
class FileType:
    """One preset. `number` is what `general.file_type` says."""

    name: str
    number: int
    base: GGMLType


_NUMBERS = """
F32 0, F16 1, BF16 32, Q4_0 2, Q4_1 3, Q8_0 7, Q5_0 8, Q5_1 9, Q6_0 135, Q6_K 18, IQ4_NL 25,
IQ4_XS 30, IQ1_S 24, IQ1_M 31, Q2_K 10, Q2_K_S 21:Q2_K, Q3_K_S 11:Q3_K, Q3_K_M 12:Q3_K, Q3_K 12,
Q3_K_L 13:Q3_K, Q4_K_S 14:Q4_K, Q4_K_M 15:Q4_K, Q4_K 15, Q5_K_S 16:Q5_K, Q5_K_M 17:Q5_K, Q5_K 17,
IQ2_XXS 19, IQ2_XS 20, IQ2_S 28:IQ2_XS, IQ2_M 29:IQ2_S, IQ3_XS 22:IQ3_S, IQ3_XXS 23, IQ3_S 26,
IQ3_M 27:IQ3_S, TQ1_0 36, TQ2_0 37, MXFP4 38, MXFP4_MOE 38:MXFP4, NVFP4 39, Q1_0 40:Q1_0_G128,
Q2_0 41, IQ1_BN 136, IQ2_BN 137, IQ2_K 138, IQ3_K 139, IQ4_K 140, IQ5_K 141, IQ6_K 142, IQ4_KS 145,
IQ3_KL 146:IQ3_K, IQ2_KS 147, IQ4_KSS 148, Q8_KV 149, IQ5_KS 150, IQ2_KT 151, IQ3_KT 152,
IQ4_KT 153, IQ3_KS 154, IQ2_KL 155, IQ1_KT 156, Q4_0_4_4 33, Q4_0_4_8 34, Q4_0_8_8 35, Q4_0_R8 202,
Q8_0_R8 207, Q5_0_R4 208, Q2_K_R4 210, Q3_K_R4 211, Q4_K_R4 214, Q5_K_R4 216, Q6_K_R4 218,
IQ2_XXS_R4 219, IQ2_XS_R4 220, IQ3_XXS_R4 223, IQ1_S_R4 224, IQ4_NL_R4 225, IQ3_S_R4 226,
IQ2_M_R4 229:IQ2_S_R4, IQ4_XS_R8 230, IQ1_M_R4 231, BF16_R16 232, Q6_0_R4 335, IQ2_BN_R4 337,
IQ2_K_R4 338, IQ3_K_R4 339, IQ4_K_R4 340, IQ5_K_R4 341, IQ4_KS_R4 345, IQ5_KS_R4 350, MXFP4_R8 351,
Q8_KV_R8 398, Q8_K_R8 399
"""


def _parse(text: str) -> dict[str, FileType]:
    table: dict[str, FileType] = {}
    for entry in text.replace("\n", " ").split(","):
        name, number = entry.split()
        number, _, base = number.partition(":")
        if name in table:
            raise RuntimeError(f"preset {name} is listed twice")
        table[name] = FileType(name, int(number), TYPES[base or name])
    return table


FILE_TYPES = _parse(_NUMBERS)


def file_type(which: str | int) -> FileType:
    """Return the preset with this name (any case) or number. Q4_K and Q4_K_M share a number; it
    gives the shorter name, which llama-quantize lists first. Raise UnknownTypeError listing similar
    names if there is none.
    """
    which = str(which)
    found = FILE_TYPES.get(which.upper())
    if found is None and which.isdecimal():
        numbered = [f for f in FILE_TYPES.values() if f.number == int(which)]
        found = next(
            (f for f in numbered if f"{f.name}_M" in FILE_TYPES), next(iter(numbered), None)
        )
    if found is None:
        import difflib

        close = difflib.get_close_matches(which.upper(), FILE_TYPES, n=4, cutoff=0.5)
        raise UnknownTypeError(
            f"unknown quantization '{which}'"
            + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    return found

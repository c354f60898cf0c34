"""Value tables of the non-linear types, as float32 so that compiled code reads them as constants.

A table with two halves lists the plain values first and then the same values moved by a constant; a bit per group (or per
scale) chooses the half. Source: the public `ggml-common.h` of ik_llama.cpp.
"""

from __future__ import annotations

import numpy as np


def _halves(values: list[int], shift: int) -> np.ndarray:
    return np.array(values + [v + shift for v in values], dtype=np.float32)


IQ4NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
IQ4K_VALUES = _halves(IQ4NL_VALUES.astype(int).tolist(), 4)
IQ2NL_VALUES = _halves([-31, -13, 1, 17], 5)
IQ3NL_VALUES = _halves([-63, -40, -23, -10, 1, 13, 28, 47], 4)

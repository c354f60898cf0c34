"""Value tables of the non-linear types, in float32, which compiled code reads as constants.

A table with two halves lists the plain values first and then the same values moved by a constant; a
bit per group (or per scale) chooses the half. Source: the public `ggml-common.h` of ik_llama.cpp.
"""

from __future__ import annotations

import numpy as np


def _halves(values: list[int], shift: int) -> np.ndarray:
    return np.array(values + [v + shift for v in values], dtype=np.float32)


IQ4NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
IQ4K_VALUES = _halves(IQ4NL_VALUES.astype(int).tolist(), 4)
IQ2NL_VALUES = _halves([-31, -13, 1, 17], 5)
IQ3NL_VALUES = _halves([-63, -40, -23, -10, 1, 13, 28, 47], 4)
IQ5NL_VALUES = _halves(
    [
        -126,
        -114,
        -103,
        -92,
        -83,
        -74,
        -65,
        -57,
        -50,
        -43,
        -36,
        -30,
        -24,
        -18,
        -12,
        -6,
        -1,
        5,
        11,
        17,
        23,
        29,
        36,
        43,
        51,
        59,
        68,
        77,
        87,
        97,
        109,
        121,
    ],
    2,
)
IQ6NL_VALUES = _halves(
    [
        -127,
        -121,
        -115,
        -109,
        -104,
        -98,
        -93,
        -88,
        -84,
        -79,
        -74,
        -70,
        -66,
        -62,
        -58,
        -54,
        -51,
        -47,
        -44,
        -40,
        -37,
        -34,
        -31,
        -28,
        -25,
        -22,
        -19,
        -16,
        -13,
        -11,
        -8,
        -5,
        -2,
        0,
        3,
        6,
        9,
        12,
        14,
        17,
        20,
        23,
        27,
        30,
        33,
        36,
        40,
        44,
        47,
        51,
        55,
        59,
        63,
        68,
        72,
        77,
        82,
        87,
        92,
        98,
        103,
        109,
        115,
        121,
    ],
    1,
)

# A code of IQ2_KL encodes two neighbours: (even element, odd element).
IQ2KL_VALUES = np.array(
    [
        (-63, -23),
        (-63, 13),
        (-40, -63),
        (-40, -10),
        (-40, 13),
        (-40, 47),
        (-23, -40),
        (-23, -23),
        (-23, 1),
        (-23, 13),
        (-23, 28),
        (-10, -63),
        (-10, 1),
        (-10, 13),
        (-10, 47),
        (1, -23),
        (1, -10),
        (1, 1),
        (1, 13),
        (1, 28),
        (13, -40),
        (13, -23),
        (13, -10),
        (13, 1),
        (13, 13),
        (28, -63),
        (28, -23),
        (28, 1),
        (28, 28),
        (28, 47),
        (47, -23),
        (47, 13),
    ],
    dtype=np.float32,
)

# Doubled E2M1 values: scales that go with them are halved. Code 8 gives +0.
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _cubic(codes: np.ndarray) -> np.ndarray:
    """Return ((c3*q + c2)*q + c1)*q + c0 with one rounding to float32 per step, as fused
    multiply-adds do it.

    float64 does the same here: each product and sum needs at most 31 bits (a code has 6, a
    coefficient or intermediate result 24, and their exponents are close), so it is exact and only
    the conversion to float32 rounds.
    """
    value = np.full(codes.shape, 0.0011972, dtype=np.float32)
    for coefficient in (-0.11218, 6.2568, -127.0):
        value = (codes.astype(np.float64) * value + np.float64(np.float32(coefficient))).astype(
            np.float32
        )
    return value


# The cubic that the integer table of IQ6_K is rounded from. ggml's row decoder evaluates it instead
# of reading the table.
IQ6NL_CUBIC = np.concatenate([_cubic(np.arange(64)), _cubic(np.arange(64)) + np.float32(1)])

"""Q4_0, Q5_0, Q6_0, IQ4_NL: blocks of 32 with one half-precision scale. Byte maps:
`formats/codecs/legacy.py`.

The block is a single group. The search tries a ladder of scales with both signs, then a finer
ladder around the best one; each rung of that is rounded to half precision, as it will be stored,
before its error is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import nearest_half, write_half
from ...formats.kernel import device_function, specialize, unbound
from ...formats.tables import IQ4NL_VALUES
from .lanes import CHAINS, LANES, PAIRS, gains, lane_of_largest, lane_of_least, largest_of
from .one_pass import half_search
from .values import value_set

# Free names of the template, bound per type by `single_search`.
LADDER = FINE = np.ones(LANES, dtype=np.float32)
score_lanes = error_lanes = stored = round_d = unbound


@device_function
def as_float(d):
    """Return d as float32: the rounding of a d that the row header stores in float32."""
    return np.float32(d)


def _search_single(x, w, lanes):
    """Return the scale, as stored, with the smallest weighted squared error for the block. lanes:
    float32[6, LANES] scratch.
    """
    extreme = largest_of(x)
    if extreme == 0:
        return np.float32(0)
    top = np.float32(0)
    best = np.float32(0)
    for part in range(len(LADDER) // LANES):
        for c in range(LANES):
            lanes[0, c] = LADDER[part * LANES + c] / extreme
        score_lanes(x, w, 0, len(x), np.float32(0), lanes[0], lanes[1], lanes[2])
        gains(lanes[1], lanes[2], lanes[3])
        winner = lane_of_largest(lanes[3])
        if lanes[3, winner] > top:
            top = lanes[3, winner]
            best = lanes[1, winner] / lanes[2, winner]
    if best == 0:
        return np.float32(0)
    for c in range(LANES):
        lanes[0, c] = np.float32(1) / (best * FINE[c])
    score_lanes(x, w, 0, len(x), np.float32(0), lanes[0], lanes[1], lanes[2])
    stored(lanes[1], lanes[2], lanes[0])
    error_lanes(x, w, 0, len(x), lanes[2], lanes[0], lanes[1], lanes[3])
    return lanes[0, lane_of_least(lanes[3])]


def _stored(sxv, svv, scale):
    """scale = sxv / svv as it will be stored; then sxv = 1 / scale, and svv = 0 as the shifts."""
    for c in range(len(scale)):
        rounded = round_d(sxv[c] / (svv[c] if svv[c] > 0 else np.float32(1)))
        rounded = rounded if svv[c] > 0 else np.float32(0)
        scale[c] = rounded
        sxv[c] = np.float32(1) / rounded if rounded != 0 else np.float32(0)
        svv[c] = np.float32(0)


def single_search(
    values: np.ndarray,
    *,
    reach: tuple[float, float],
    rungs: int,
    fine: float,
    sides: int = 2,
    half: bool = True,
) -> tuple[Callable, Callable]:
    """Compile (search(x, w, lanes) -> d, code_of(x, scale, shift) -> int). `fine`: half width of
    the second ladder.

    rungs: per side, all together a multiple of LANES; sides: 1 if the value set is (nearly)
    symmetric, else 2; half: d is stored in half precision (else float32).
    """
    names = value_set(values)
    ladder = np.abs(values).max() * np.geomspace(*reach, rungs)
    names |= {
        "LADDER": np.concatenate([ladder, -ladder][:sides]).astype(np.float32),
        "round_d": nearest_half if half else as_float,
        "FINE": np.linspace(1 - fine, 1 + fine, LANES).astype(np.float32),
    }
    for part, template in (PAIRS if "FIRST" in names else CHAINS).items():
        names[part] = specialize(template, **names)
    names["stored"] = specialize(_stored, **names)
    return specialize(_search_single, **names), names["code_of"]


_q4_0, _q4_0_code = single_search(np.arange(-8, 8), reach=(0.7, 1.7), rungs=16, fine=0.04)
_iq4_nl, _iq4_nl_code = single_search(IQ4NL_VALUES, reach=(0.7, 1.7), rungs=16, fine=0.04)
_q5_0, _q5_0_code = single_search(np.arange(-16, 16), reach=(0.85, 1.3), rungs=16, fine=0.03)
_q4_0_in_one_pass = half_search(-8, 7, step=32, below=9)
_q6_0, _q6_0_code = single_search(np.arange(-32, 32), reach=(0.92, 1.15), rungs=16, fine=0.01)


@device_function
def _pack_nibbles(block, j, low, high):
    block[2 + j] = low | high << 4


def q4_0(x, w, block, lanes):
    """Search a Q4_0 block and write it: x, w float32[32], block uint8[18]; lanes: scratch, see
    `steps.py`.
    """
    d = write_half(block, 0, _q4_0(x, w, lanes))
    for j in range(16):
        _pack_nibbles(
            block, j, _q4_0_code(x[j], d, np.float32(0)), _q4_0_code(x[j + 16], d, np.float32(0))
        )


def q4_0_symmetric(x, block):
    """Use codes -7 to 7, with the largest magnitude at the end of the range, whatever the
    importances are: weights that were trained so are stored exactly.
    """
    largest = np.float32(0)
    for j in range(32):
        largest = max(largest, abs(x[j]))
    d = write_half(block, 0, largest / np.float32(7))
    for j in range(16):
        low = np.floor(x[j] / d + np.float32(8.5)) if d != 0 else np.float32(8)
        high = np.floor(x[j + 16] / d + np.float32(8.5)) if d != 0 else np.float32(8)
        block[2 + j] = (
            int(min(max(low, np.float32(1)), np.float32(15)))
            | int(min(max(high, np.float32(1)), np.float32(15))) << 4
        )


def q4_0_fast(x, w, block, lanes):
    """Search in one pass instead of six, for layouts of Q4_0 that are meant to be made while a
    model is loaded.
    """
    d = write_half(block, 0, _q4_0_in_one_pass(x, w, lanes))
    inverse = np.float32(1) / d if d != 0 else np.float32(0)
    for j in range(16):
        low = np.floor(x[j] * inverse + np.float32(8.5))
        high = np.floor(x[j + 16] * inverse + np.float32(8.5))
        block[2 + j] = (
            int(min(max(low, np.float32(0)), np.float32(15)))
            | int(min(max(high, np.float32(0)), np.float32(15))) << 4
        )


def iq4_nl(x, w, block, lanes):
    """Search an IQ4_NL block and write it: x, w float32[32], block uint8[18]; lanes: scratch, see
    `steps.py`.
    """
    d = write_half(block, 0, _iq4_nl(x, w, lanes))
    for j in range(16):
        _pack_nibbles(
            block,
            j,
            _iq4_nl_code(x[j], d, np.float32(0)),
            _iq4_nl_code(x[j + 16], d, np.float32(0)),
        )


@device_function
def write_five_bits(block, high, low, i, q):
    """Write the code of element i to fifth bits at byte `high` and nibbles at byte `low`, both
    cleared before.
    """
    block[low + (i & 15)] |= (q & 15) << (4 * (i >> 4))
    block[high + (i >> 3)] |= (q >> 4) << (i & 7)


def q5_0(x, w, block, lanes):
    """Search a Q5_0 block and write it: x, w float32[32], block uint8[22]; lanes: scratch, see
    `steps.py`.
    """
    block[:] = 0
    d = write_half(block, 0, _q5_0(x, w, lanes))
    for i in range(32):
        write_five_bits(block, 2, 6, i, _q5_0_code(x[i], d, np.float32(0)))


def q6_0(x, w, block, lanes):
    """Search a Q6_0 block and write it: x, w float32[32], block uint8[26]; lanes: scratch, see
    `steps.py`.
    """
    block[:] = 0
    d = write_half(block, 0, _q6_0(x, w, lanes))
    for i in range(32):
        q = _q6_0_code(x[i], d, np.float32(0))
        block[10 + (i & 15)] |= (q & 15) << (4 * (i >> 4))
        block[2 + (i & 7)] |= (q >> 4) << (4 * (i >> 3 & 1) + 2 * (i >> 4))


SINGLE_SEARCHES = {
    "Q4_0": q4_0,
    "Q5_0": q5_0,
    "Q6_0": q6_0,
    "IQ4_NL": iq4_nl,
    "Q4_0_4_4": q4_0_fast,
    "Q4_0_4_8": q4_0_fast,
    "Q4_0_8_8": q4_0_fast,
}

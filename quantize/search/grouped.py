"""Search for types whose groups share one scale d: y_i = (d * k_g) * (v_i + shift_g), with a small
integer k_g per group.

IQ2_K, IQ3_K, IQ4_K, IQ4_KS, Q6_K and their relatives differ in the value set, in the integers a
group scale can be, and in whether d belongs to a block (half precision) or to a row (float32). They
share this search:

1. `_scan`: per group and shift, the best free scale s from a geometric ladder on both signs; each
   rung is judged with its own least-squares scale.
2. `_try_scales`, `_pick_scale`: several d are tried, chosen so that the largest s meets the ends of
   the integer range; the d with the smallest total error after rounding every s/d wins.
3. `_settle`: with d fixed, the integers around s/d are tried exactly, for each shift.
4. `_fit`, `_refit`: with all integers and values fixed the least-squares d has a closed form. It is
   rounded as it will be stored, and step 3 is repeated (`_retry`, `_judge`) as long as that lowers
   the error.

Weights are the importances themselves: the search minimises sum_i w_i (x_i - y_i)^2, the importance
matrix's estimate of the error in the layer's output. Below four bits two corrections lower the
measured KL divergence (`docs/benchmarks/quality.md`): `emphasis` multiplies the weights by (mean
x^2 + x_i^2)^(1/4), and `gain` stretches d slightly, because a least-squares fit is always shorter
than the values it fits, and the lost length adds up over layers.

The templates of steps 1 and 2 are in `grouped_scan.py`, those of 3 and 4 in `grouped_fit.py`; they
follow the contract of `steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import nearest_half
from ...formats.kernel import device_function, specialize
from . import lanes as lane_functions
from .grouped_fit import LAST_STEPS, REFIT_STEPS, SETTLE_CALLS, SETTLE_STEPS, least_squares_sums
from .grouped_scan import EMPHASIS_STEP, SCAN_CALLS, SCAN_STEPS
from .lanes import LANES
from .steps import Steps
from .values import value_set


@device_function
def as_row_float(d):
    """Return d in single precision, limited so that its product with any two signed bytes is
    finite.
    """
    return min(max(np.float32(-2e34), d), np.float32(2e34))


def grouped_steps(
    name: str,
    values: np.ndarray,
    *,
    group: int,
    integers: range,
    shifts: tuple[float, ...] = (0,),
    reach: tuple[float, float],
    fill: tuple[float, float],
    half: bool,
    rungs: int = LANES,
    emphasis: bool = False,
    gain: float = 1.0,
    rounds: int = 1,
    parts: dict[str, Callable] | None = None,
) -> Steps:
    """The steps of the search for one type. In the end groups[:-1, CHOSEN:CHOSEN+2] hold integers
    and shift numbers, groups[-1, STRETCHED] holds d as stored, and `own` the codes, as float32.

    values: ascending value set; integers: what a group scale can be; shifts: the choices of moving
    the set; reach, rungs: the ladder for either sign, as multiples of (largest value) / (largest
    x); fill: the part of the integer range that the largest group scale is tried to occupy; half: d
    is stored in half precision (else float32); emphasis, gain: see above; rounds: how often step 4
    is repeated at most (more than once lowers the error by less than 0.1 %); parts: templates that
    take the place of `score_lanes`, `error_lanes`, `fit_sums`, `codes_of` where the choice of one
    value depends on others; such a `codes_of` finds the weights where it stores the codes.
    """
    low, high = integers[0], integers[-1]
    part, ladder = np.linspace(*fill, LANES // 2), np.geomspace(*reach, rungs)
    names = value_set(values)
    names |= {
        "GROUP": group,
        "LOW": low,
        "HIGH": high,
        "STEP": integers.step,
        "SHIFTS": np.array(shifts, dtype=np.float32),
        "EMPHASIS": emphasis,
        "GAIN": gain,
        "LADDER": (np.abs(values).max() * np.concatenate([ladder, -ladder])).astype(np.float32),
        "TARGETS": np.concatenate([low * part, high * part]).astype(np.float32),
        "round_d": nearest_half if half else as_row_float,
    }
    judges = {
        "score_lanes": lane_functions.score_lanes,
        "error_lanes": lane_functions.error_lanes,
        "fit_sums": least_squares_sums,
    }
    for part, template in (judges | (parts or {})).items():
        names[part] = specialize(template, **names)
    for template in (*SCAN_CALLS, *SETTLE_CALLS):
        step = template.__name__.lstrip("_")
        names[step] = specialize(template, **names)
    first = [*([EMPHASIS_STEP] if emphasis else []), *SCAN_STEPS, *SETTLE_STEPS]
    again = range(len(first), len(first) + len(REFIT_STEPS))
    order = [*first, *REFIT_STEPS, *LAST_STEPS]
    compiled = {template: specialize(template, **names) for _, template in order}
    return Steps(
        name, group, tuple((over, compiled[template]) for over, template in order), again, rounds
    )

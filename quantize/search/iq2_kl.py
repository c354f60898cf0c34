"""IQ2_KL: one code of five bits for two neighbouring elements, y = (d * k) * pair. Byte map:
`formats/codecs/iq_ks.py`.

The 32 pairs consist of eight values, but not every two values are a pair: the best pair for given
elements and weights is found by adding the error of each first value to the smallest error among
its second values.

The search is that of `grouped.py` with this choice in place of the nearest value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats.codecs.scalars import write_u16
from ...formats.kernel import from_source, inlined_function
from ...formats.tables import IQ2KL_VALUES
from .grouped import grouped_steps
from .grouped_scan import CHOSEN
from .iq_ks import half_head
from .lanes import LANES
from .steps import RowSearch

_VALUES = np.unique(IQ2KL_VALUES)


@inlined_function
def _off(x, w, sv):
    rest = x - sv
    return (w * rest) * rest


def _judge(name: str, keep: str) -> Callable:
    """Compile name(x0, x1, w0, w1, s), generated from the table: the smallest w0 (x0 - s a)^2 + w1
    (x1 - s b)^2 over all pairs (a, b). keep: "error" to return that error, "pair" to return (a, b,
    code) of that pair.
    """
    lines = [f"def {name}(x0, x1, w0, w1, s):"]
    for n, v in enumerate(_VALUES):
        lines += [
            f"s{n} = s * float32({v})",
            f"first{n} = off(x0, w0, s{n})",
            f"second{n} = off(x1, w1, s{n})",
        ]
    for n, v in enumerate(_VALUES):
        codes = np.flatnonzero(IQ2KL_VALUES[:, 0] == v)
        for count, code in enumerate(codes):
            b = IQ2KL_VALUES[code, 1]
            error = f"second{np.searchsorted(_VALUES, b)}"
            if count == 0:
                lines += [f"error, b, code = {error}, float32({b}), float32({code})"]
                continue
            if keep == "pair":
                lines += [
                    f"b = float32({b}) if {error} < error else b",
                    f"code = float32({code}) if {error} < error else code",
                ]
            lines += [f"error = min(error, {error})"]
        lines += [f"error = first{n} + error"]
        if n == 0:
            lines += [f"least, least_a, least_b, least_code = error, float32({v}), b, code"]
            continue
        if keep == "pair":
            lines += [
                f"least_a = float32({v}) if error < least else least_a",
                "least_b = b if error < least else least_b",
                "least_code = code if error < least else least_code",
            ]
        lines += ["least = min(least, error)"]
    lines += ["return least" if keep == "error" else "return least_a, least_b, least_code"]
    return from_source(
        "\n    ".join(lines), name, __file__, {"off": _off, "float32": np.float32}, inline=True
    )


_pair_error = _judge("_pair_error", "error")
_best_pair = _judge("_best_pair", "pair")


def _score_lanes(x, w, at, n, shift, inverse, sxv, svv):
    for c in range(LANES):
        sxv[c] = np.float32(0)
        svv[c] = np.float32(0)
    for i in range(at, at + n, 2):
        x0, x1, w0, w1 = x[i], x[i + 1], w[i], w[i + 1]
        for c in range(LANES):
            a, b, _ = _best_pair(x0 * inverse[c], x1 * inverse[c], w0, w1, np.float32(1))
            sxv[c] += (w0 * x0) * a + (w1 * x1) * b
            svv[c] += (w0 * a) * a + (w1 * b) * b


def _error_lanes(x, w, at, n, shift, scale, inverse, error):
    for c in range(LANES):
        error[c] = np.float32(0)
    for i in range(at, at + n, 2):
        x0, x1, w0, w1 = x[i], x[i + 1], w[i], w[i + 1]
        # Not LANES: a loop of known length is unrolled before it can become vector instructions.
        for c in range(len(error)):
            error[c] += _pair_error(x0, x1, w0, w1, scale[c])


def _fit_sums(x, w, at, d, k, shift, sxv, svv):
    scale = d * k
    for c in range(LANES):
        i = at + 2 * c
        a, b, _ = _best_pair(x[i], x[i + 1], w[i], w[i + 1], scale)
        sxv[c] += k * ((w[i] * x[i]) * a + (w[i + 1] * x[i + 1]) * b)
        svv[c] += (k * k) * ((w[i] * a) * a + (w[i + 1] * b) * b)


def _codes_of(x, at, n, scale, shift, codes):
    """codes holds the weights on entry; the code of a pair is written twice."""
    for c in range(LANES):
        i = at + 2 * c
        _, _, code = _best_pair(x[i], x[i + 1], codes[i], codes[i + 1], scale)
        codes[i] = code
        codes[i + 1] = code


def iq2_kl(block, codes, groups):
    """Write an IQ2_KL block, uint8[86], from its codes, float32[256], and the rows of `groups`."""
    block[:] = 0
    high = 0
    for b in range(8):
        k = int(groups[b, CHOSEN]) + 32
        high |= k >> 4 << (2 * b)
        block[2 + (b & 3)] |= (k & 15) << (4 * (b // 4))
        for p in range(16):
            q = int(codes[32 * b + 2 * p])
            block[6 + 16 * (b // 2) + p] |= (q & 15) << (4 * (b & 1))
            block[70 + p] |= q >> 4 << b
    write_u16(block, 0, high)


_steps = grouped_steps(
    "iq2_kl",
    _VALUES,
    group=32,
    integers=range(-32, 32),
    reach=(0.7, 1.8),
    fill=(1.1, 0.75),
    half=True,
    emphasis=True,
    gain=1.03,
    parts={
        "score_lanes": _score_lanes,
        "error_lanes": _error_lanes,
        "fit_sums": _fit_sums,
        "codes_of": _codes_of,
    },
)
STEPPED_SEARCHES = {"IQ2_KL": RowSearch(_steps, half_head, iq2_kl, __file__)}

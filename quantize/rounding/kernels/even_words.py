"""Choose a word of codes that have an even number of ones together, for IQ4_KSS.

Free names, bound per type: DIM, and the functions.
"""

from __future__ import annotations

import numpy as np

from ....formats.kernel import unbound
from .word_search import TWICE

DIM = 4
CODES = 16  # of an element
conditional = codes_in_turn = unbound


def _conditional(m, given):
    """Put B and W of m = B diag(W) B^T, B upper with ones on its diagonal, into `given`."""
    for back in range(DIM):
        k = DIM - 1 - back
        weight = m[k, k]
        for l in range(k + 1, DIM):
            weight -= given[DIM * k + l] * given[DIM * k + l] * given[TWICE + l]
        given[TWICE + k] = weight
        for j in range(k):
            total = m[j, k]
            for l in range(k + 1, DIM):
                total -= given[DIM * j + l] * given[DIM * k + l] * given[TWICE + l]
            given[DIM * j + k] = total / weight


def _codes_in_turn(x, scale, values, flipped, given, work):
    """Return (codes, parity, error) of a word whose elements are chosen one after another.

    flipped: the element that takes the nearest code of the parity that its nearest code does not
    have; the last one then makes the parity even. DIM for none.
    """
    codes = 0
    parity = 0
    error = np.float32(0)
    for k in range(DIM):
        target = x[k]
        for j in range(k):
            target += work[j] * given[DIM * j + k]
        even_code = 0
        odd_code = 0
        even_least = np.float32(np.inf)
        odd_least = np.float32(np.inf)
        for c in range(CODES):
            rest = abs(target - scale * values[c])
            ones = c ^ c >> 2
            if (ones ^ ones >> 1) & 1:
                if rest < odd_least:
                    odd_least = rest
                    odd_code = c
            elif rest < even_least:
                even_least = rest
                even_code = c
        odd = 0 if even_least <= odd_least else 1
        if k == flipped:
            odd = 1 - odd
        if flipped < DIM and k == DIM - 1:
            odd = parity
        parity ^= odd
        code = odd_code if odd else even_code
        rest = odd_least if odd else even_least
        codes |= code << (4 * k)
        work[k] = x[k] - scale * values[code]
        error += given[TWICE + k] * (rest * rest)
    return codes, parity, error


def _nearest_even(x, m, scale, book, start, values, indices, a, b, given, work, hits, eights):
    """Return (codes, error) of about the best word with an even number of ones. values: float32[2,
    1, CODES].
    """
    conditional(m, given)
    codes, parity, error = codes_in_turn(x, scale, values[book, 0], DIM, given, work)
    if parity == 0:
        return codes, error
    least = np.float32(np.inf)
    for flipped in range(DIM):
        made, _, error = codes_in_turn(x, scale, values[book, 0], flipped, given, work)
        if error < least:
            codes = made
            least = error
    return codes, least


def _put_codes(scale, book, index, values, given, q):
    """Set q float32[DIM] to the values of codes."""
    for i in range(DIM):
        q[i] = scale * values[book, 0, index >> (4 * i) & 15]
    return 0

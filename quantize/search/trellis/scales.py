"""The guessed scale of a block of a trellis type, the row's d that suits the guesses, and the
multiples of d that are tried: steps 1 and 2 of the search in `rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....formats.kernel import device_function, unbound

# Free names of the templates below, bound per type by `trellis_search`.
SIZE = 1.0
TRIALS, SPREAD = 2, 0.0
POSITIVE = NEGATIVE = np.ones(1, dtype=np.float32)
TARGETS = np.ones(1, dtype=np.float32)
closeness = unbound
SMALLEST = 1e-6  # of a guess, relative to the largest magnitude of the row


@device_function
def misfit(ratio):
    """Return about the squared logarithm of ratio; twice that below 1, where values are clipped."""
    square = ratio + np.float32(1) / ratio - np.float32(2)
    return square + square if ratio < np.float32(1) else square


def guess_scale(x, w):
    """Return the guessed scale of a block of 32."""
    total = np.float32(0)
    weight = np.float32(0)
    for i in range(32):
        root = np.sqrt(w[i])
        square = x[i] * x[i]
        total += (root * square) * square
        weight += root
    return max(np.float32(SIZE) * np.sqrt(np.sqrt(total / weight)), np.float32(SMALLEST))


def choose_d(groups):
    """Return d for the blocks' guesses groups[b, 0] and energies groups[b, 1]."""
    largest = np.float32(0)
    for b in range(len(groups)):
        if groups[b, 1] > 0:
            largest = max(largest, groups[b, 0])
    winner = np.float32(0)
    least = np.float32(np.inf)
    for c in range(len(TARGETS)):
        d = largest / TARGETS[c]
        total = np.float32(0)
        for b in range(len(groups)):
            total += closeness(groups[b, 0] / d) * groups[b, 1]
        if total < least:
            least = total
            winner = d
    return winner


def closeness_in_table(guess):
    """Return the least misfit of a multiple with the guess."""
    lowest = np.float32(np.inf)
    for k in range(len(POSITIVE)):
        lowest = min(lowest, misfit(POSITIVE[k] / guess))
    for k in range(len(NEGATIVE)):
        lowest = min(lowest, misfit(NEGATIVE[k] / guess))
    return lowest


def closeness_of_integers(guess):
    """Return the same for integers."""
    k = max(min(np.floor(guess + np.float32(0.5)), POSITIVE[len(POSITIVE) - 1]), np.float32(1))
    return misfit(k / guess)


def nearest_multiples(multiples, guess, trials):
    """trials[:TRIALS] = those of the ascending `multiples` that differ least from the guess by
    their ratio.
    """
    first = 0
    for k in range(1, len(multiples) - TRIALS + 1):
        if misfit(multiples[k + TRIALS - 1] / guess) < misfit(multiples[k - 1] / guess):
            first = k
    for j in range(TRIALS):
        trials[j] = multiples[first + j]


def spread_multiples(multiples, guess, trials):
    """trials[:TRIALS] = integers around the guess, SPREAD of it apart, within the ascending
    integers `multiples`.
    """
    step = max(np.floor(np.float32(SPREAD) * guess + np.float32(0.5)), np.float32(1))
    last = multiples[len(multiples) - 1]
    first = np.floor(guess + np.float32(0.5)) - step * np.float32(TRIALS // 2)
    first = max(min(first, last - step * np.float32(TRIALS - 1)), multiples[0])
    for j in range(TRIALS):
        trials[j] = min(first + step * np.float32(j), last)


def scale_calls(integers: bool) -> dict[str, Callable]:
    """Return the templates by the names that others call them by, in the order to bind them.
    integers: the multiples of d are a range of integers, not a table.
    """
    return {
        "closeness": closeness_of_integers if integers else closeness_in_table,
        "choose_trials": spread_multiples if integers else nearest_multiples,
        "guess_scale": guess_scale,
        "choose_d": choose_d,
    }

"""Search for the types whose values come from a generator, IQ1_KT to IQ4_KT, over one row.

A block of 32 values has a scale d * k, with k one of few integers; groups of 8 values (IQ4_KT: 4)
share an index.

1. A block's scale is first guessed from a norm of its values: SIZE * (sum sqrt(w) x^4 / sum
   sqrt(w))^(1/4). This norm is between the root mean square and the maximum, and within a tenth of
   the best scale of a block.
2. The row's d is the one of several whose multiples are closest to these guesses.
3. For each block several k around the guess are tried, with both signs and both books if the type
   has two: each is another codebook, and with so few groups the best of several is much better. For
   every trial the best code word of every group is found among all of them (`nearest.py`).
4. With everything else fixed, d is the least-squares d.

Weights are the importances. A least-squares fit is shorter than the values it fits, and the lost
length adds up over layers: up to three bits, d is stretched slightly at the end, which lowers the
measured KL divergence (`docs/benchmarks/quality.md`). More weight for larger values, as in
`grouped.py`, did not lower it here.

Matrix products multiply IQ2_KT and IQ3_KT by a further 1.05 and 1.01, which ggml's row decoder
leaves out: the values fitted here are those of the products (`decode(..., as_weights=True)`).

The search divides a row by its largest magnitude, so that rows of any size stay in the range of
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....formats.codecs.trellis import PRODUCT_FACTORS, trellis_step, trellis_value
from ....formats.kernel import specialize, unbound
from ..lanes import largest_magnitude
from . import nearest
from .scales import scale_calls
from .tree import CODEBOOKS, FAN, LEAF

# Free names of the templates below, bound per type.
DIM, GROUPS, BOOKS = 8, 4, 1
GIVEN, WORK = 24, 144
GAIN = 1.0
MAGNITUDES = False
TRIALS = 2
INTEGERS = False  # the multiples are a range of integers and not a table
POSITIVE = NEGATIVE = np.ones(1, dtype=np.float32)
STARTS = np.zeros(1, dtype=np.int64)
nearest_word = guess_scale = closeness = choose_d = choose_trials = search_block = unbound


def _search_block(
    x,
    w,
    at,
    d,
    guess,
    words,
    indices,
    leaf_boxes,
    node_boxes,
    given,
    work,
    hits,
    hits_by_eight,
    multiples,
    trial,
    index,
    found,
    row,
):
    """The best multiple of d for x[at : at+32] and its code words: found[row] gets indices,
    multiple, book; returns the error.

    multiples: float32[TRIALS], trial: int32[GROUPS], index: int32[1], scratch; the rest as for
    `nearest_word`.
    """
    least = np.float32(np.inf)
    for side in range(2):
        table = POSITIVE if side == 0 else NEGATIVE
        if len(table) == 0:
            continue
        choose_trials(table, guess / d, multiples)
        for book in range(BOOKS):
            for g in range(GROUPS):
                trial[g] = -1
            for j in range(TRIALS):
                multiple = multiples[j] if side == 0 else -multiples[j]
                total = np.float32(0)
                for g in range(GROUPS):
                    index[0] = trial[g]
                    total += nearest_word(
                        x,
                        w,
                        at + g * DIM,
                        d * multiple,
                        least - total,
                        book,
                        STARTS[book],
                        words,
                        indices,
                        leaf_boxes,
                        node_boxes,
                        given,
                        work,
                        hits,
                        hits_by_eight,
                        index,
                    )
                    trial[g] = index[0]
                    if not total < least:  # cannot win
                        break
                if total < least:
                    least = total
                    found[row, GROUPS] = int(multiple)
                    found[row, GROUPS + 1] = book
                    for g in range(GROUPS):
                        found[row, g] = trial[g]
    return least


def _search_row(x, w, words, indices, leaf_boxes, node_boxes, own, groups, chosen):
    """Search a row in all four steps. chosen int32[n / 32, GROUPS + 2] = the results of
    `_search_block`. Return d as stored.
    """
    blocks = len(x) // 32
    top = largest_magnitude(x)
    if top == 0:
        chosen[:] = 0
        return np.float32(0)
    for i in range(len(x)):
        own[i] = abs(x[i]) / top if MAGNITUDES else x[i] / top
    for b in range(blocks):
        at = 32 * b
        energy = np.float32(0)
        for i in range(at, at + 32):
            energy += (w[i] * own[i]) * own[i]
        groups[b, 0] = guess_scale(own[at : at + 32], w[at : at + 32])
        groups[b, 1] = energy
    d = choose_d(groups[:blocks])
    given, work = np.empty(GIVEN, np.float32), np.empty(WORK, np.float32)
    hits_by_eight = np.empty(LEAF // 8, np.int64)
    hits = hits_by_eight.view(np.uint8)
    multiples, trial, index = (
        np.empty(TRIALS, np.float32),
        np.empty(GROUPS, np.int32),
        np.empty(1, np.int32),
    )
    sxv = np.float32(0)
    svv = np.float32(0)
    for b in range(blocks):
        at = 32 * b
        if groups[b, 1] == 0 and INTEGERS:
            chosen[b] = 0  # an exact zero
            continue
        search_block(
            own,
            w,
            at,
            d,
            groups[b, 0],
            words,
            indices,
            leaf_boxes,
            node_boxes,
            given,
            work,
            hits,
            hits_by_eight,
            multiples,
            trial,
            index,
            chosen,
            b,
        )
        a = np.float32(0)
        c = np.float32(0)
        for g in range(GROUPS):
            state = chosen[b, g] + STARTS[chosen[b, GROUPS + 1]]
            for i in range(at + DIM * g, at + DIM * g + DIM):
                state = trellis_step(state)
                v = np.float32(trellis_value(state))
                v = abs(v) if MAGNITUDES else v
                a += (w[i] * own[i]) * v
                c += (w[i] * v) * v
        k = np.float32(chosen[b, GROUPS])
        sxv += k * a
        svv += (k * k) * c
    return ((sxv / svv) * np.float32(GAIN)) * top if svv > 0 else np.float32(0)


@dataclass(frozen=True)
class Settings:
    """Settings of a type's search.

    positive, negative: the magnitudes, ascending, that a multiple can have with either sign; size:
    of the guess, in units of the code words' root mean square; trials: multiples tried per sign and
    book; spread: their distance as a part of the guess, 0 for neighbours in a table that is not a
    range of integers; gain: d is multiplied by it at the end; reach: see `nearest.py`.
    """

    positive: tuple[float, ...]
    negative: tuple[float, ...]
    size: float
    trials: int
    spread: float = 0.0
    gain: float = 1.0
    reach: float = 1.0

    def names(self, name: str) -> dict[str, object]:
        """Return the constants of the search for the type `name`."""
        book = CODEBOOKS[name]
        largest = max(self.positive + self.negative)
        return {
            "DIM": book.dim,
            "GROUPS": 32 // book.dim,
            "BOOKS": len(book.starts),
            "MAGNITUDES": book.magnitudes,
            "SIZE": self.size / WORD_SIZE,
            "GAIN": self.gain / PRODUCT_FACTORS.get(name, 1.0),
            "TRIALS": self.trials,
            "SPREAD": self.spread,
            "INTEGERS": self.spread > 0,
            "TARGETS": (largest * np.linspace(0.72, 1.2, 17)).astype(np.float32),
            "POSITIVE": np.array(self.positive, dtype=np.float32),
            "NEGATIVE": np.array(self.negative, dtype=np.float32),
        }


# Root mean square of a value: the sum of four uniform distributions over 0..63, less 126.
WORD_SIZE = np.sqrt(4 * (64**2 - 1) / 12)


def word_search(name: str, reach: float) -> Callable:
    """Compile `nearest_word` of nearest.py for one type."""
    book = CODEBOOKS[name]
    names: dict[str, object] = {
        "DIM": book.dim,
        "LEAF": LEAF,
        "NODES": book.nodes(LEAF),
        "FAN": FAN,
        "MAGNITUDES": book.magnitudes,
        "REACH": reach,
        "trellis_step": trellis_step,
        "trellis_value": trellis_value,
    }
    names["score_word"] = specialize(nearest._score_word, **names)
    return specialize(nearest._nearest_word, **names)


def trellis_search(name: str, settings: Settings) -> Callable:
    """Compile the search for one type: search(x, w, words, indices, leaf boxes, node boxes, own,
    groups, chosen) -> d.
    """
    names = settings.names(name) | {
        "LEAF": LEAF,
        "STARTS": np.array(CODEBOOKS[name].starts),
        "GIVEN": nearest.GIVEN,
        "WORK": nearest.WORK,
        "nearest_word": word_search(name, settings.reach),
    }
    for step, template in scale_calls(settings.spread > 0).items():
        names[step] = specialize(template, **names)
    names["search_block"] = specialize(_search_block, **names)
    return specialize(_search_row, **names)

"""Solve a multiple-choice knapsack: one candidate for every tensor, so that together they fit into
a number of bytes and do the least damage.

Only candidates on the lower convex hull of (bytes, damage) can be optimal for some price of a byte
(Everett, "Generalized Lagrange Multiplier Method", 1963). Taking the steps between them in order of
damage saved per byte gives the optimum at every size that it passes. The bytes left are then used
for single candidates and for exchanges between two tensors, which may leave the hull. Damages
become integers before anything is compared, so that the result does not depend on the order of
floating point operations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError

_UNITS = 1 << 60  # the largest sum of damages in units of damage


@dataclass(frozen=True)
class Candidate:
    """The bytes that a candidate takes, and the damage that it does, in any unit that adds up."""

    n_bytes: int
    damage: float


def allocate(tensors: Sequence[Sequence[Candidate]], budget: int) -> list[int]:
    """Return the index of a candidate for every tensor: together at most `budget` bytes, with
    (nearly) the smallest sum of damages.

    The result is never worse than the best result of a price per byte, and usually optimal. Raise
    UsageError if even the smallest candidates take more, ValueError for damages that are negative
    or not finite.
    """
    if any(
        not math.isfinite(choice.damage) or choice.damage < 0
        for choices in tensors
        for choice in choices
    ):
        raise ValueError("damages are finite and not negative")
    least = sum(min(choice.n_bytes for choice in choices) for choices in tensors)
    if least > budget:
        raise UsageError(f"the smallest types take {least} bytes, more than the {budget} available")
    worst = sum(max(choice.damage for choice in choices) for choices in tensors) or 1.0
    counted = [
        [(choice.n_bytes, round(choice.damage / worst * _UNITS)) for choice in choices]
        for choices in tensors
    ]
    chosen = _along_the_hulls(counted, budget)
    while _exchange(counted, chosen, budget):
        pass
    return chosen


def _along_the_hulls(tensors: list[list[tuple[int, int]]], budget: int) -> list[int]:
    """Go up from the smallest candidates by damage saved per byte, until nothing more fits."""
    hulls = [_hull(choices) for choices in tensors]
    chosen = [hull[0] for hull in hulls]
    left = budget - sum(choices[index][0] for choices, index in zip(tensors, chosen))
    steps = []
    for number, (choices, hull) in enumerate(zip(tensors, hulls)):
        for position, (before, after) in enumerate(zip(hull, hull[1:])):
            cost, saved = (
                choices[after][0] - choices[before][0],
                choices[before][1] - choices[after][1],
            )
            # An integer: ties are broken by tensor.
            steps.append((-(saved * _UNITS // cost), number, position, after, cost))
    stopped = set()
    for _, number, _, after, cost in sorted(steps):
        if number in stopped:
            continue
        if cost > left:
            stopped.add(number)  # its later steps build on this one
            continue
        chosen[number] = after
        left -= cost
    return chosen


def _hull(choices: list[tuple[int, int]]) -> list[int]:
    """Return the indices of the candidates on the lower convex hull, from the smallest, each with
    less damage than the one before.
    """
    order = sorted(range(len(choices)), key=lambda index: (*choices[index], index))
    hull: list[int] = []
    for index in order:
        size, damage = choices[index]
        if hull and damage >= choices[hull[-1]][1]:
            continue
        while len(hull) > 1:
            (s0, d0), (s1, d1) = (choices[found] for found in hull[-2:])
            if (d0 - d1) * (size - s1) > (d1 - damage) * (s1 - s0):
                break
            hull.pop()
        hull.append(index)
    return hull


def _exchange(tensors: list[list[tuple[int, int]]], chosen: list[int], budget: int) -> bool:
    """Make the best change of one tensor or two that lowers the damage and fits, in place. Return
    whether there was one.
    """
    left = budget - sum(choices[index][0] for choices, index in zip(tensors, chosen))
    moves = []  # (more bytes, less damage, tensor, choice)
    for number, (choices, now) in enumerate(zip(tensors, chosen)):
        size, damage = choices[now]
        moves += [
            (s - size, damage - d, number, index)
            for index, (s, d) in enumerate(choices)
            if index != now
        ]
    moves.sort(key=lambda move: (move[0], -move[1], move[2], move[3]))
    sizes = [move[0] for move in moves]
    best_two = _best_of_two_tensors(moves)
    best, gain = None, 0
    for move in moves:
        if move[0] <= left and move[1] > gain:
            best, gain = (move,), move[1]
        upto = bisect_right(sizes, left - move[0])
        if not upto:
            continue
        other = next((other for other in best_two[upto - 1] if other[2] != move[2]), None)
        if other is not None and move[1] + other[1] > gain:
            best, gain = (move, other), move[1] + other[1]
    for _, _, number, index in best or ():
        chosen[number] = index
    return best is not None


def _best_of_two_tensors(
    moves: list[tuple[int, int, int, int]],
) -> list[tuple[tuple[int, int, int, int], ...]]:
    """Return for each place in `moves` the move up to there that saves most damage, and the best
    one of another tensor.
    """
    found, result = (), []
    for move in moves:
        ranked = sorted((*found, move), key=lambda m: -m[1])
        first = ranked[0]
        second = next((m for m in ranked[1:] if m[2] != first[2]), None)
        found = (first,) if second is None else (first, second)
        result.append(found)
    return result

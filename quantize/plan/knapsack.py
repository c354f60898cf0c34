"""One choice for every tensor, so that together they fit a number of bytes and do the least damage:
a multiple-choice knapsack.

Only choices on the lower convex hull of (bytes, damage) can be optimal for some price of a byte
(Everett, "Generalized Lagrange Multiplier Method", 1963). Buying the steps between them in order of
damage saved per byte gives, at every size it passes, the optimum for that size; what room is left
then is filled by single choices and by exchanges between two tensors, which may leave the hull.
Damages become integers before anything is compared, so that the result depends on no order of
floating point operations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UsageError

_UNITS = 1 << 60  # damage is counted in such parts of the largest sum of damages


@dataclass(frozen=True)
class Choice:
    """What a choice takes, in bytes, and how much worse it makes the result, in any unit that may
    be added up.
    """

    n_bytes: int
    damage: float


def allocate(tensors: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """The index of a choice for every tensor: together at most `budget` bytes, with (nearly) the
    smallest sum of damages.

    Never worse than the best point that a price per byte could give, and usually optimal.
    UsageError where even the smallest choices take more, saying how much; damages that are negative
    or not finite are a ValueError of the caller's.
    """
    if any(
        not math.isfinite(choice.damage) or choice.damage < 0
        for choices in tensors
        for choice in choices
    ):
        raise ValueError("damages are finite and not negative")
    least = sum(min(choice.n_bytes for choice in choices) for choices in tensors)
    if least > budget:
        raise UsageError(f"the smallest types take {least} bytes, and there is room for {budget}")
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
    """From the smallest choices upward, by damage saved per byte, until nothing more fits."""
    hulls = [_hull(choices) for choices in tensors]
    chosen = [hull[0] for hull in hulls]
    room = budget - sum(choices[index][0] for choices, index in zip(tensors, chosen))
    steps = []
    for number, (choices, hull) in enumerate(zip(tensors, hulls)):
        for position, (before, after) in enumerate(zip(hull, hull[1:])):
            cost, saved = (
                choices[after][0] - choices[before][0],
                choices[before][1] - choices[after][1],
            )
            steps.append(
                (-(saved * _UNITS // cost), number, position, after, cost)
            )  # an integer: ties are told by tensor
    stopped = set()
    for _, number, _, after, cost in sorted(steps):
        if number in stopped:
            continue
        if cost > room:
            stopped.add(number)  # its later steps count from this one
            continue
        chosen[number] = after
        room -= cost
    return chosen


def _hull(choices: list[tuple[int, int]]) -> list[int]:
    """Indices of the choices on the lower convex hull, from the smallest, each with less damage
    than the one before.
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
    """Make the best change of one tensor or of two that lowers the damage and still fits, in place;
    whether there was one.
    """
    room = budget - sum(choices[index][0] for choices, index in zip(tensors, chosen))
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
        if move[0] <= room and move[1] > gain:
            best, gain = (move,), move[1]
        upto = bisect_right(sizes, room - move[0])
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
    """For each place in `moves`, the one that saves most damage up to there, and the one that does
    so for another tensor.
    """
    found, result = (), []
    for move in moves:
        ranked = sorted((*found, move), key=lambda m: -m[1])
        first = ranked[0]
        second = next((m for m in ranked[1:] if m[2] != first[2]), None)
        found = (first,) if second is None else (first, second)
        result.append(found)
    return result

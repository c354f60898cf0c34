"""Choosing one candidate for every tensor so that together they fit: the best choice, quickly."""

from __future__ import annotations

import itertools
import random

import pytest
from iqforge.errors import UsageError
from iqforge.quantize.plan.knapsack import Candidate, allocate


def problem(rng: random.Random) -> list[list[Candidate]]:
    """Tensors of several sizes with types whose damage falls with the bits, some of them worse than
    others of the same size.
    """
    tensors = []
    for _ in range(rng.randint(1, 5)):
        rows, sensitivity = rng.choice([1, 3, 10]), rng.lognormvariate(0, 2)
        bits = [rng.randint(12, 90) for _ in range(rng.randint(1, 6))]
        tensors.append(
            [
                Candidate(rows * b, sensitivity * rows * 4 ** (-b / 10) * rng.uniform(0.7, 1.3))
                for b in bits
            ]
        )
    return tensors


def total(tensors: list[list[Candidate]], chosen: list[int]) -> tuple[int, float]:
    picked = [choices[index] for choices, index in zip(tensors, chosen)]
    return sum(c.n_bytes for c in picked), sum(c.damage for c in picked)


def test_allocation_against_every_possibility():
    rng, optimal, count, excess = random.Random(1), 0, 300, []
    for _ in range(count):
        tensors = problem(rng)
        sizes = [
            total(tensors, combination)
            for combination in itertools.product(*(range(len(c)) for c in tensors))
        ]
        least, most = min(s for s, _ in sizes), max(s for s, _ in sizes)
        budget = rng.randint(least, most)
        size, damage = total(tensors, allocate(tensors, budget))
        best = min(d for s, d in sizes if s <= budget)
        assert size <= budget
        optimal += damage <= best * (1 + 1e-9)
        excess.append(damage / best - 1)
    assert optimal >= 0.95 * count
    assert sum(excess) / count < 0.01


def test_allocation_is_no_worse_than_any_price_of_a_byte():
    rng = random.Random(2)
    for _ in range(20):
        tensors = [list(choices) for _ in range(20) for choices in problem(rng)]
        for price in (1e-4, 1e-2, 1, 100):
            chosen = [
                min(
                    range(len(choices)),
                    key=lambda i: choices[i].damage + price * choices[i].n_bytes,
                )
                for choices in tensors
            ]
            size, damage = total(tensors, chosen)
            assert total(tensors, allocate(tensors, size))[1] <= damage * (1 + 1e-9)


def test_allocation_uses_the_budget_and_refuses_too_small_ones():
    tensors = [
        [Candidate(10, 5.0), Candidate(20, 1.0)],
        [Candidate(10, 5.0), Candidate(20, 2.0), Candidate(21, 1.0)],
    ]
    assert allocate(tensors, 20) == [0, 0]
    assert allocate(tensors, 30) == [1, 0]
    assert allocate(tensors, 40) == [1, 1]
    assert allocate(tensors, 1000) == [1, 2]
    with pytest.raises(UsageError, match="20 bytes.*19"):
        allocate(tensors, 19)
    with pytest.raises(ValueError, match="damages are finite"):
        allocate([[Candidate(1, float("nan"))]], 5)


def test_allocation_is_quick_for_a_large_model_and_the_same_every_time():
    rng = random.Random(3)
    tensors = [
        [Candidate(1000 * b, 4 ** (-b / 10) * rng.lognormvariate(0, 1)) for b in range(12, 90, 2)]
        for _ in range(800)
    ]
    budget = 800 * 1000 * 40 + 777
    first = allocate(tensors, budget)
    assert first == allocate(tensors, budget)
    assert budget * 0.995 <= total(tensors, first)[0] <= budget

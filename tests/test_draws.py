"""Random numbers and draws of tokens: known answers, shares, and what a draw depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.errors import EvaluationError, UsageError
from iqforge.runtime.network.sampling import GREEDY, Sampling, candidates, philox, sample, uniform


def test_philox_known_answers():
    """The answers are those of the authors' Random123 (kat_vectors, philox4x32 10)."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    )


def test_uniform():
    drawn = np.array([uniform(7, position) for position in range(4000)])
    assert (
        drawn.min() >= 0
        and drawn.max() < 1
        and abs(drawn.mean() - 0.5) < 0.02
        and len(set(drawn)) > 3990
    )
    assert uniform(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24
    assert uniform(1 << 32, 0) != uniform(0, 0) != uniform(0, 1)


def test_greedy_takes_the_lowest_of_the_best():
    assert sample(torch.tensor([1.0, 3, 2, 3]), GREEDY, 0) == 1


def test_candidates_are_ordered_totally():
    logits = torch.tensor([0.0, 2, 1, 2, 1, 1, 3])
    for k in range(1, 8):
        values, ids = candidates(logits, k)
        assert ids.tolist() == [6, 1, 3, 2, 4, 5, 0][:k] and values.tolist() == logits[ids].tolist()
    assert (
        candidates(logits, 0)[1].tolist()
        == candidates(logits, 100)[1].tolist()
        == [6, 1, 3, 2, 4, 5, 0]
    )


def drawn_shares(logits: torch.Tensor, sampling: dict, n: int = 3000) -> np.ndarray:
    ids = [sample(logits, Sampling(**sampling, seed=5), position) for position in range(n)]
    return np.bincount(ids, minlength=len(logits)) / n


LOGITS = torch.tensor([0.5, 2.0, 1.0, -1.0, 1.5])
EVERYTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


# The temperature comes after the choice.
@pytest.mark.parametrize(
    "sampling, kept",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"temperature": 3.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.3}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.5}, [1, 4]),  # e^-0.5 = 0.61, e^-1 = 0.37
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.5}, [1, 4]),
        ({"top_p": 0.8}, [1, 2, 4]),  # 0.44, 0.71, 0.87, 0.97, 1
        ({"top_k": 3, "top_p": 0.9}, [1, 2, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 4]),  # of three candidates: 0.51, 0.81, 1
        ({"top_p": 0.8, "temperature": 9.0}, [1, 2, 4]),
    ],
)
def test_shares_of_drawn_tokens(sampling, kept):
    sampling = EVERYTHING | sampling
    expected = np.zeros(5)
    expected[kept] = np.exp(LOGITS.numpy()[kept] / sampling["temperature"])
    np.testing.assert_allclose(drawn_shares(LOGITS, sampling), expected / expected.sum(), atol=0.03)


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    first, second, other = (
        [sample(logits, Sampling(1.0, 0, 1.0, 0.0, seed), p) for p in range(50)]
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_values_out_of_range():
    for bad in (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**64},
    ):
        with pytest.raises(UsageError):
            Sampling(**bad)
    with pytest.raises(EvaluationError, match="not finite"):
        sample(torch.tensor([1.0, float("nan")]), GREEDY, 3)

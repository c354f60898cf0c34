"""Products of stored matrices with several rows at once are those of one row, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iqforge.formats.types import ggml_type
from iqforge.runtime.simd import dots, products, together
from iqforge.runtime.simd.units import UNITS
from iqforge.runtime.weights import kept
from iqforge.runtime.weights.kept import Multiplication, kept_rows, products_of_each

from .stored_rows import COLUMNS, stored

ROWS = 21  # of a matrix, no multiple of what is done together
# Floats; scales of a row, of each 32 and of blocks that are read ahead; a codebook.
TYPES = ("F16", "Q8_0", "IQ4_KS", "Q4_K", "IQ3_XXS")
NAMES = [
    pytest.param(name, marks=() if name in TYPES else pytest.mark.full) for name in sorted(UNITS)
]


@pytest.fixture
def threads():
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounds", [False, True])
def test_several_rows_are_multiplied_as_each(name, rounds):
    """Groups of all sizes, and with 8 bits also columns beyond the last 256."""
    type = ggml_type(name)
    columns = 5 * COLUMNS if type.block_size > 64 else 5 * COLUMNS + 64
    whole = kept_rows(type, stored(name, 64, columns), columns)  # and one row, for groups of rows
    numbers = [0, 0, 1, 1, 1, 2, *[0] * 4, *[1] * 5, 2, 0, *[2] * 17, *[1] * 40, 0, 0]
    x = torch.randn(len(numbers), columns, generator=torch.Generator().manual_seed(0))
    each = [Multiplication(whole, i * ROWS, (i + 1) * ROWS, rounds=rounds) for i in range(3)]
    expected = torch.cat([each[e](x[i, None]) for i, e in enumerate(numbers)])
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        assert torch.equal(products_of_each(whole, ROWS, numbers, x, rounds=rounds), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value):
    whole = kept_rows(ggml_type("Q8_0"), stored("Q8_0", ROWS), COLUMNS)
    x = torch.ones(3, COLUMNS)
    x[1, 300] = value
    for rounds in (False, True):
        y = products_of_each(whole, ROWS, [0, 0, 0], x, rounds=rounds)
        assert not y[1].isfinite().any() and y[0].isfinite().all() and y[2].isfinite().all()


@pytest.mark.parametrize(
    ("chosen", "groups", "left"),
    [
        ([0, 1, 0], [], [0, 1, 0]),
        ([4, 4, 1, 2, 2, 2], [(4, 0, 2), (2, 3, 3)], [-1, -1, 1, -1, -1, -1]),
        ([3] * 9, [(3, 0, 4), (3, 4, 4)], [*[-1] * 8, 3]),
        ([3] * 10, [(3, 0, 4), (3, 4, 4), (3, 8, 2)], [-1] * 10),
        ([], [], []),
    ],
)
def test_rows_of_a_matrix_are_grouped(chosen, groups, left):
    chosen = np.array(chosen, dtype=np.int64)
    assert kept._groups(chosen, 4).tolist() == [list(group) for group in groups]
    assert chosen.tolist() == left


@pytest.mark.skipif(not dots.available(), reason="needs AVX2")
@pytest.mark.parametrize("rounds", [False, True])
def test_a_matrix_is_decoded_once_for_its_rows(rounds, monkeypatch):
    """No operation reads it row by row if all have company."""

    def refuse(*arguments, **options):
        raise AssertionError("one by one")

    tables, multiplications = [], together.multiplications

    def note(*arguments):
        tables.append(arguments[-1].tolist())
        return multiplications(*arguments)

    monkeypatch.setattr(together, "multiplications", note)
    monkeypatch.setattr(dots, "multiplications", refuse)
    monkeypatch.setattr(products.Rows, "multiplications", refuse)
    whole = kept_rows(ggml_type("Q8_0"), stored("Q8_0", 2 * ROWS), COLUMNS)
    products_of_each(whole, ROWS, [0, 0, 1, 1, 1], torch.ones(5, COLUMNS), rounds=rounds)
    assert tables == [[[0, 0, 2], [1, 2, 3]]]

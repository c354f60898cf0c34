"""Matrices that are made when they are used."""

import pytest
from iqforge.runtime.weights.many import Matrices


def test_each_is_made_once_when_it_is_used():
    made = []
    matrices = Matrices(4, lambda i: made.append(i) or f"matrix {i}")
    assert len(matrices) == 4 and not made
    assert matrices[2] == "matrix 2" and matrices[-2] == "matrix 2"
    assert matrices[1:3] == ["matrix 1", "matrix 2"]
    assert list(matrices) == [f"matrix {i}" for i in range(4)]
    assert made == [2, 1, 0, 3]
    with pytest.raises(IndexError):
        matrices[4]

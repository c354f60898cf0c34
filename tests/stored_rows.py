"""Random rows of every type, and types as parameters of tests that compile code for each."""

from __future__ import annotations

import numpy as np
import pytest
from iqforge.runtime.bench.random_blocks import random_rows

COLUMNS = 512
# One of each way to read codes. The others take half a minute to compile.
FAMILIES = (
    *("BF16", "Q8_0", "Q5_1", "MXFP4", "Q4_K", "IQ3_K", "IQ2_KS", "IQ4_KSS", "IQ2_KL"),
    *("IQ3_XXS", "IQ1_M", "IQ4_KT", "TQ1_0", "IQ1_BN", "IQ4_K_R4", "IQ1_S_R4"),
)


def stored(name: str, n_rows: int = 16, n_cols: int = COLUMNS) -> np.ndarray:
    return random_rows(name, n_rows, n_cols, 0.5, np.random.default_rng(7))


def of_types(names: list[str]) -> list:
    """Return the names as parameters, those outside of `FAMILIES` for the full run."""
    return [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.full) for name in names
    ]

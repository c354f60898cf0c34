"""Call functions from Python that are compiled for other compiled functions only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def from_python(function: Any) -> Callable:
    """Return a compiled function that passes its arguments on to `function`, which is compiled too
    if it is not yet.
    """
    if not hasattr(function, "py_func"):
        return numba.njit(error_model="numpy")(function)

    @numba.njit(error_model="numpy")
    def call(*arguments):
        return function(*arguments)

    return call

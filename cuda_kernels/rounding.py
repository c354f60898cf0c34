"""The kernels that round with second moments: codes column by column, vectors of eight columns,
words of tables and of trellises, and products whose sums have the order of the CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .compile.spec import KernelSpec

COLUMNS = KernelSpec(
    "round_columns",
    ("rounding/columns.cu",),
    (),
    (
        "gather_columns",
        "read_block",
        "round_columns",
        "errors_of_codes",
        "descend_columns",
        "units_of_scale",
        "refit_scale",
        "follow_scale",
        "write_rows",
    ),
    fma=False,
)
VECTORS = KernelSpec(
    "round_vectors",
    ("rounding/vectors.cu",),
    (),
    (
        "round_vectors",
        "errors_of_vectors",
        "descend_vectors",
        "blocks_of_diagonal",
        "write_vectors",
    ),
    fma=False,
)
WORDS = KernelSpec(
    "round_words",
    ("rounding/words.cu",),
    (),
    (
        "round_words",
        "round_codes_of_words",
        "errors_of_words",
        "descend_words",
        "order_moments",
        "order_columns",
        "write_words",
    ),
    fma=False,
)
TRELLIS = KernelSpec(
    "round_trellis",
    ("rounding/trellis.cu",),
    (),
    ("round_trellis", "errors_of_trellis", "descend_trellis", "write_trellis"),
    fma=False,
)
PRODUCTS = KernelSpec("round_products", ("rounding/products.cu",), (), ("add_products",), fma=False)
FACTOR = KernelSpec(
    "round_factor",
    ("rounding/factor.cu",),
    (),
    (
        "shrink_moments",
        "factor_block",
        "factor_rows",
        "subtract_products",
        "feedback_of_factor",
        "held_out_products",
    ),
    fma=False,
)
WARPS = 8  # rows of a CUDA block of the kernels with one row per warp
TILE = 128  # rows and columns of a CUDA block of `add_products`
MOST_COLUMNS = 256  # that a kernel works on together
MOST_CODES = 64
FACTORED = 32  # columns that are factored together
SQUARE = 64  # rows and columns of a CUDA block of `subtract_products`
MOST_LEVELS = 512
MOST_MAGNITUDES = 8192  # of a table of vectors


@dataclass(frozen=True)
class From:
    """An array of a device from this element on, as an argument of a kernel."""

    array: Any
    elements: int


def specs() -> list[KernelSpec]:
    """Return the kernels for rounding."""
    return [COLUMNS, VECTORS, WORDS, TRELLIS, PRODUCTS, FACTOR]


@functools.cache
def spec_of(kernel: str) -> KernelSpec:
    """Return the spec that holds a kernel."""
    return next(spec for spec in specs() if kernel in spec.functions)

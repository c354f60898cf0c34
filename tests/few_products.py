"""Matrices and expected results for tests of products of few tokens."""

from __future__ import annotations

import numpy as np
import torch
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.cuda_kernels.packed.matrix import PackedMatrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.formats.types import ggml_type
from iqforge.runtime.bench.random_blocks import random_rows


def packed(type: str, rows: int, cols: int, seed: int, device: str = "cuda") -> PackedMatrix:
    rng = np.random.default_rng(seed)
    drawn = random_rows(ggml_type(type), 64, cols, 1.0, rng)
    return pack_matrix(type, [np.resize(drawn, (rows, drawn.shape[1]))], rows, cols, 1, device)


def expected(matrices: list[PackedMatrix], x: torch.Tensor, bias=None) -> torch.Tensor:
    """Return float64[n, all rows]."""
    weights = [decode_matrix(m, torch.float32).double() for m in matrices]
    y = torch.cat([x.double() @ w.T for w in weights], dim=1)
    return y if bias is None else y + bias.double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())

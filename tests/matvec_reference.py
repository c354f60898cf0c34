"""What matrix-vector kernels are compared with: random matrices, and products in float64."""

from __future__ import annotations

import numpy as np
import torch
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.cuda_kernels.packed.pack import pack_matrix
from iqforge.runtime.bench.random_blocks import random_rows

EPS = 1e-5


def matrix(name, rows, cols, n_matrices=1, seed=0, device="cpu"):
    data = random_rows(
        name, rows * n_matrices, cols, 0.05, np.random.default_rng([seed, rows, cols])
    )
    return pack_matrix(name, [data], rows, cols, n_matrices, device)


def weights(m):
    return decode_matrix(m, torch.float32).double().view(m.n_matrices, m.rows, m.cols)


def rounded(x, type=None):
    """Return activations as the kernels round them for quantized matrices: 8 bits, a scale of max /
    127 per 32. Floats are not rounded for a type of floats.
    """
    x = x.float()
    if type is not None and type.is_float:
        return x.double()
    groups = x.reshape(*x.shape[:-1], -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    # The product is not rounded before.
    q = torch.round(groups.double() * torch.where(most > 0, 127 / most, 0).double())
    return (q * (most / 127).double()).reshape(x.shape)


def normed(h, weight, type=None):
    """Return normed activations. The norm's divisor is applied after rounding."""
    x = h if weight is None else h * weight
    return rounded(x, type) / (h.double().square().mean(-1, keepdim=True) + EPS).sqrt()


def silu(x):
    return x / (1 + (-x).exp())


def draw(*shape, seed=1, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def assert_close(actual, expected, most=1e-5):
    """Compare results: `most` is the relative error of all together."""
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected).norm() < most * expected.norm()

"""Latent attention by products of a warpgroup without a GPU: its operands are read where their
descriptors say.
"""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from iqforge.cuda_kernels.attention.mla_shape import LatentShape, fits

from .kernels_on_host import LIMIT, RUN_LATENT, library, pointer
from .latent_reference import allowed, latent_error

F16 = torch.float16
SHAPES = [
    LatentShape(1, 3, 24, 64, 64, 40, "F16", F16, warpgroup=True),
    LatentShape(2, 9, 24, 64, 128, 32, "BF16", F16, True, warpgroup=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_attention(shape, tmp_path):
    assert fits(shape, LIMIT)
    kernel = library(tmp_path, shape.spec(LIMIT), RUN_LATENT)

    def run(splits, q, kv, norm, eps, angles, keys, values, cache, positions, scale, out):
        kernel.run(
            splits,
            *map(pointer, (q, kv, norm)),
            ctypes.c_float(eps),
            *map(pointer, (angles, keys, values, cache, positions)),
            ctypes.c_float(scale),
            pointer(out),
            pointer(None),
        )

    for n_past, splits in ((0, 8), (61, 8), (300, 2), (180, 1), (500, 1)):
        error, same = latent_error(shape, n_past, 512, torch.device("cpu"), partial(run, splits))
        assert error < allowed(shape, n_past, splits)
        assert same > 0.99

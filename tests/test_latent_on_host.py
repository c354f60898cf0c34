"""Kernels of latent attention in a decoding step without a GPU: compiled by g++, except for a few
hardware instructions.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial

import pytest
import torch
from iqforge.cuda_kernels.attention.mla_shape import TILE, LatentShape, fits

from .kernels_on_host import LIMIT, RUN_LATENT, library, pointer
from .latent_reference import CHOSEN_SHAPES, ENCODED_SHAPES, SHAPES, allowed, latent_error


# On the host a thread of the GPU is one of the system: more than three heads take minutes.
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(s, marks=[] if s.heads <= 3 else [pytest.mark.full])
        for s in SHAPES + CHOSEN_SHAPES + ENCODED_SHAPES
    ],
    ids=str,
)
def test_latent_attention(shape, tmp_path):
    check(shape, LIMIT, tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        LatentShape(1, 2, 24, 64, 512, 32, "F32", torch.float16),
        LatentShape(2, 2, 24, 64, 512, 32, "Q8_0", torch.float16, hadamard=64),
        LatentShape(1, 2, 24, 64, 512, 32, "Q8_KV", torch.float16, chosen=96),
    ],
    ids=str,
)
def test_latent_attention_in_little_shared_memory(shape, tmp_path):
    """Of 99 KB, as consumers' GPUs have: tiles have a quarter of the positions."""
    assert shape.tile(97 << 10)[0] == TILE // 4
    check(shape, 97 << 10, tmp_path)


def check(shape, limit, tmp_path):
    assert fits(shape, limit)
    kernel = library(tmp_path, shape.spec(limit), RUN_LATENT)

    def run(
        splits, q, kv, norm, eps, angles, keys, values, cache, positions, scale, out, chosen=None
    ):
        kernel.run(
            splits,
            *map(pointer, (q, kv, norm)),
            ctypes.c_float(eps),
            *map(pointer, (angles, keys, values, cache, positions)),
            ctypes.c_float(scale),
            pointer(out),
            pointer(chosen),
        )

    # A block alone, also on a tile that is not full, and several that have to be joined.
    for n_past, splits in ((0, 8), (61, 8), (300, 8), (180, 1)):
        error, same = latent_error(shape, n_past, 512, torch.device("cpu"), partial(run, splits))
        assert error < allowed(shape, n_past, splits)
        # Norm and rotation round differently, which can move an element to the next number.
        assert same > 0.99


def test_shapes_without_kernels():
    shape = SHAPES[0]
    for change in (
        {"type": "Q8_0"},
        {"nope": 20},
        {"rope": 8},
        {"rank": 72},
        {"rows": 9},
    ):
        assert not fits(replace(shape, **change), LIMIT)
    assert not fits(replace(shape, rank=512), 48 * 1024)

"""Choices that a search makes for several elements at once, against all allowed choices, one by
one.
"""

from __future__ import annotations

import itertools

import iqforge
import numpy as np
from iqforge.formats.tables import IQ2KL_VALUES, IQ4NL_VALUES
from iqforge.quantize.encode import encode
from iqforge.quantize.search import iq2_kl, iq4_kss

from .from_python import from_python


def group(seed):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(32).astype(np.float32), generator.lognormal(size=32).astype(
        np.float32
    )


def lanes(function, x, w, shift, scale):
    """Return the errors that `function`, an `error_lanes`, finds for sixteen scales."""
    error = np.empty(16, dtype=np.float32)
    from_python(function)(
        x, w, 0, 32, np.full(16, shift, dtype=np.float32), scale, 1 / scale, error
    )
    return error


def test_four_codes_of_even_parity():
    x, w = group(1)
    scale = np.linspace(0.01, 0.03, 16, dtype=np.float32) * np.where(
        np.arange(16) % 2, -1, 1
    ).astype(np.float32)
    allowed = np.array(
        [
            codes
            for codes in itertools.product(range(16), repeat=4)
            if sum(c.bit_count() for c in codes) % 2 == 0
        ]
    )
    for shift in (0, 4):
        found = lanes(iq4_kss._error_lanes, x, w, shift, scale)
        for c in range(16):
            each = w[:, None] * (x[:, None] - scale[c] * (IQ4NL_VALUES + shift)) ** 2
            expected = sum(
                sum(each[e][allowed[:, k]] for k, e in enumerate((i, i + 1, i + 16, i + 17))).min()
                for i in range(0, 16, 2)
            )
            assert np.isclose(found[c], expected, rtol=1e-5)


def test_pairs_of_two_neighbours():
    x, w = group(2)
    scale = np.linspace(0.005, 0.05, 16, dtype=np.float32) * np.where(
        np.arange(16) % 2, -1, 1
    ).astype(np.float32)
    found = lanes(iq2_kl._error_lanes, x, w, 0, scale)
    for c in range(16):
        rest = x.reshape(16, 1, 2) - scale[c] * IQ2KL_VALUES
        assert np.isclose(
            found[c], (w.reshape(16, 1, 2) * rest**2).sum(axis=2).min(axis=1).sum(), rtol=1e-5
        )


def best_pairs(x, w, scale):
    rest = x.reshape(-1, 1, 2) - scale.reshape(-1, 1, 2) * IQ2KL_VALUES
    return (w.reshape(-1, 1, 2) * rest**2).sum(axis=2).min(axis=1).sum()


def test_written_pairs_are_the_best_for_the_written_scales():
    x, w = (np.concatenate([group(seed)[part] for seed in range(8)]) for part in (0, 1))
    data = encode("IQ2_KL", x[None], w)
    ones = data.copy()
    # Code 17 everywhere, the pair (1, 1): decodes to the scales.
    ones[:, 2 + 6 : 2 + 70], ones[:, 2 + 70 :] = (
        0x11,
        0xFF,
    )
    y, scale = (iqforge.decode("IQ2_KL", rows, 256)[0] for rows in (data, ones))
    # The search weighs large values a little more and stretches the scale after the choice; 1 %
    # covers both.
    assert (w * (x - y) ** 2).sum() <= best_pairs(x, w, scale) * 1.01


def test_zero_weights_and_ties_keep_the_parity():
    for x in (
        np.zeros((1, 256)),
        np.ones((1, 256)),
        np.full((1, 256), 1e-30),
        np.where(np.arange(256) % 7, 0.0, 3.0)[None],
    ):
        data = encode("IQ4_KSS", x.astype(np.float32), np.where(np.arange(256) % 5, 0.0, 1.0))
        y = iqforge.decode("IQ4_KSS", data, 256)
        assert np.isfinite(y).all() and np.abs(x - y).max() <= 0.2 * np.abs(x).max() + 1e-12

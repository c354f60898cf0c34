"""Searches: against the reference's errors, against brute force, and on difficult rows."""

from __future__ import annotations

import iqforge
import numpy as np
import pytest
from iqforge.errors import NonFiniteError, ShapeError, UnsupportedTypeError
from iqforge.formats.tables import IQ4NL_VALUES
from iqforge.formats.types import TYPES, ggml_type
from iqforge.quantize.encode import encode, prepare_weights
from iqforge.quantize.searches import encodable_types

from .shared import shared

INTERLEAVED = [name for name in encodable_types() if ggml_type(name).is_interleaved]
# Layouts of Q4_0 with a faster search.
FAST = ["Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8"]
# Other interleaved types are their plain types with the bytes in another order, if they have one:
# one represents all in the slow tests.
DIRECT = [name for name in INTERLEAVED if ggml_type(name).base is None or name == FAST[0]]
QUANTIZED = [
    name
    for name in encodable_types()
    if (ggml_type(name).is_quantized and name not in INTERLEAVED)
    or name in DIRECT
    or name == "IQ4_K_R4"
]
# The largest relative root mean square error of a search on standard normal values, without
# importances.
NORMAL_ERROR = {
    "Q8_0": 0.0056,
    "Q6_K": 0.0170,
    "Q4_K": 0.072,
    "Q4_0": 0.083,
    "IQ4_NL": 0.075,
    "IQ4_K": 0.062,
    "IQ4_K_R4": 0.062,
    "IQ4_KS": 0.072,
    "IQ3_K": 0.132,
    "IQ2_K": 0.278,
    "Q5_0": 0.041,
    "Q6_0": 0.0202,
    "Q4_1": 0.070,
    "Q5_1": 0.0345,
    "Q2_K": 0.263,
    "Q3_K": 0.147,
    "Q5_K": 0.0355,
    "IQ4_XS": 0.0755,
    "IQ5_K": 0.0307,
    "IQ6_K": 0.0144,
    "IQ5_KS": 0.0355,
    "IQ2_KS": 0.310,
    "IQ3_KS": 0.151,
    "MXFP4": 0.117,
    "NVFP4": 0.083,
    "Q1_0_G128": 0.61,
    "Q2_0": 0.355,
    "TQ1_0": 0.445,
    "TQ2_0": 0.445,
    "IQ1_BN": 0.88,
    "IQ2_BN": 0.88,
    "Q8_KV": 0.0081,
    "Q8_K_R8": 0.0071,
    "Q8_K_R16": 0.0071,
    "IQ2_XXS": 0.345,
    "IQ2_XS": 0.305,
    "IQ2_S": 0.255,
    "IQ3_XXS": 0.185,
    "IQ3_S": 0.140,
    "IQ1_S": 0.49,
    "IQ1_M": 0.45,
    "IQ1_S_R4": 0.49,
    "IQ1_M_R4": 0.45,
    "IQ1_KT": 0.385,
    "IQ2_KT": 0.296,
    "IQ3_KT": 0.156,
    "IQ4_KT": 0.087,
    "IQ4_KSS": 0.087,
    "IQ2_KL": 0.232,
    "Q4_0_4_4": 0.0825,
}
# The largest error of the types of one and two bits on the rows of `edge_rows`; 0.35 for the
# others.
EDGE_ERROR = {
    "Q1_0_G128": 1.0,
    "TQ1_0": 0.6,
    "TQ2_0": 0.6,
    "IQ1_BN": 1.0,
    "IQ2_BN": 1.0,
    "Q2_0": 0.6,
    "IQ1_S": 0.5,
    "IQ1_M": 0.5,
    "IQ1_S_R4": 0.5,
    "IQ1_M_R4": 0.5,
    "IQ1_KT": 0.45,
}
# Types that are encoded by the format's definition without importances, and so byte for byte as in
# the reference.
DEFINED = ["Q8_0", "MXFP4", "Q1_0_G128", "IQ1_BN", "IQ2_BN", "Q8_KV", "Q8_K_R8", "Q8_K_R16"]


def relative_error(x, y, w=1.0):
    return float(np.sqrt((w * (x - y) ** 2.0).sum() / (w * x**2.0).sum()))


def random_rows(rows=16, n_cols=1024, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((rows, n_cols)).astype(np.float32), generator.lognormal(
        size=n_cols
    ).astype(np.float32)


def test_types_of_the_promise():
    assert set(QUANTIZED) >= {
        "Q8_0",
        "Q4_0",
        "Q4_K",
        "Q6_K",
        "IQ4_NL",
        "IQ2_K",
        "IQ3_K",
        "IQ4_K",
        "IQ4_KS",
        "IQ4_K_R4",
    }


def stand_in(name, case):
    """Return (type, bytes) that the reference makes of a case without importances; if it refuses,
    those of the interleaved type.
    """
    for other in [t for t in (name, f"{name}_R4") if t in TYPES]:
        if (other == name or ggml_type(other).base == name) and f"q_{case}_no" in (
            golden := np.load(shared(f"golden/{other}.npz"))
        ):
            return other, golden[f"q_{case}_no"]
    pytest.skip(f"the reference refuses to write {name} without importances")


@pytest.mark.parametrize("importance", ["no", "im"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_no_worse_than_the_reference(name, importance):
    sources, golden = np.load(shared("golden/sources.npz")), np.load(shared(f"golden/{name}.npz"))
    im = sources["im"] if importance == "im" else None
    w = np.ones(1024) if im is None else im.astype(np.float64)
    for case in ("gauss", "student", "real") if ggml_type(name).group_rows < 16 else ("gs16",):
        x, stored = sources[case], f"q_{case}_{importance}"
        ours = iqforge.decode(name, encode(name, x, im), 1024, as_weights=True)
        other, stored = (name, golden[stored]) if stored in golden else stand_in(name, case)
        theirs = iqforge.decode(other, stored, 1024, as_weights=True)
        assert relative_error(x, ours, w) <= relative_error(x, theirs, w) * 1.0001, case


@pytest.mark.parametrize("name", [name for name in INTERLEAVED if name not in DIRECT + FAST])
def test_interleaved_types_are_their_plain_types_reordered(name):
    x, w = random_rows(n_cols=256)
    base = ggml_type(name).base
    assert np.array_equal(iqforge.deinterleave(name, encode(name, x, w), 256), encode(base, x, w))


def test_layouts_with_a_search_of_their_own_hold_the_same_rows():
    x, w = random_rows(n_cols=256)
    rows = [iqforge.deinterleave(name, encode(name, x, w), 256) for name in FAST]
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("name", DEFINED)
def test_definition_without_importance(name):
    sources, golden = np.load(shared("golden/sources.npz")), np.load(shared(f"golden/{name}.npz"))
    cases = {
        key.split("_")[1] for key in golden.files if key.startswith("q_") and key.endswith("_no")
    }
    assert "edge" in cases and len(cases) > 1
    for case in cases:
        assert np.array_equal(encode(name, sources[case]), golden[f"q_{case}_no"]), case


@pytest.mark.parametrize("importance", ["no", "im"])
@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0", "Q2_0", "IQ1_BN", "IQ2_BN", "IQ2_BN_R4"])
def test_three_values_are_kept(name, importance):
    generator = np.random.default_rng(4)
    x = generator.integers(-1, 2, (8, 1024)).astype(np.float32) * np.float32(
        0.0625 if name != "IQ2_BN" else 0.05
    )
    w = generator.lognormal(size=1024) if importance == "im" else None
    assert np.array_equal(iqforge.decode(name, encode(name, x, w), 1024), x)


@pytest.mark.parametrize("name", QUANTIZED)
def test_error_on_normal_values(name):
    x, _ = random_rows()
    assert (
        relative_error(x, iqforge.decode(name, encode(name, x), 1024, as_weights=True))
        < NORMAL_ERROR[name]
    )


@pytest.mark.parametrize("name", QUANTIZED)
def test_importance_lowers_the_weighted_error(name):
    x, w = random_rows()
    with_it, without = (iqforge.decode(name, encode(name, x, im), 1024) for im in (w, None))
    assert relative_error(x, with_it, w) < relative_error(x, without, w) * (
        0.997 if name in DEFINED or name in EDGE_ERROR else 0.99
    )


@pytest.mark.parametrize("name, values", [("IQ4_NL", IQ4NL_VALUES), ("Q4_0", np.arange(-8, 8))])
def test_against_brute_force(name, values):
    """The best of 20,000 scales per block, tried one by one, is hardly better than the result of
    the search.
    """
    x, w = random_rows(rows=2, n_cols=256, seed=3)
    found = iqforge.decode(name, encode(name, x, w), 256)
    for row in range(2):
        for start in range(0, 256, 32):
            block, weights = (
                x[row, start : start + 32].astype(np.float64),
                w[start : start + 32].astype(np.float64),
            )
            unit = np.abs(block).max() / np.abs(values).max()
            scales = (
                np.concatenate([s * unit * np.linspace(0.5, 1.6, 10000) for s in (1, -1)])
                .astype(np.float16)
                .astype(np.float64)
            )
            errors = []
            for part in np.array_split(scales, 20):
                grid = part[:, None, None] * values
                nearest = np.abs(block[None, :, None] - grid).min(axis=2)
                errors.append((weights * nearest**2).sum(axis=1))
            best = np.concatenate(errors).min()
            ours = (weights * (block - found[row, start : start + 32]) ** 2).sum()
            assert ours <= best * 1.10 and ours >= best * (1 - 1e-5)


def edge_rows():
    generator = np.random.default_rng(9)
    normal = generator.standard_normal(1024)
    rows = [
        np.zeros(1024),
        np.ones(1024),
        np.full(1024, -0.37),
        np.where(np.arange(1024) % 2, 1.0, -1.0),
        normal * 1e-30,
        normal * 1e-6,
        np.where(np.arange(1024) == 100, 1e4, normal),
        np.where(np.arange(1024) == 513, 2.5, 0.0),
        np.where(np.arange(1024) < 512, 0.0, normal),
        np.abs(normal),
        -np.abs(normal),
        normal * 1e4,
        np.linspace(-1, 1, 1024),
        np.where(generator.random(1024) < 0.9, 0.0, normal),
        normal * 1e-38,
        np.sign(normal) * 0.05,
    ]
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    "importance", ["none", "some zero", "block zero", "all zero", "huge range"]
)
def test_edge_rows(name, importance):
    x, (_, w) = edge_rows(), random_rows()
    w = {
        "none": None,
        "some zero": np.where(np.arange(1024) % 3, w, 0),
        "block zero": np.where(np.arange(1024) // 256 == 1, 0, w),
        "all zero": np.zeros(1024),
        "huge range": w * 10.0 ** np.linspace(-20, 20, 1024),
    }[importance]
    y = iqforge.decode(name, encode(name, x, w), 1024)
    assert np.isfinite(y).all()
    assert not y[0].any()
    limit = EDGE_ERROR.get(name, 0.35)
    if importance in ("none", "all zero"):
        # NVFP4 ends at 2688.
        for row in (1, 2, 3, 8, 9, 10, 11, 12) if name != "NVFP4" else (1, 2, 3, 8, 9, 10, 12):
            assert relative_error(x[row].astype(np.float64), y[row]) < limit, row
    if importance == "block zero":  # quantized as if alike, not thrown away
        assert relative_error(x[12, 256:512], y[12, 256:512]) < limit


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_beyond_half_precision_stay_finite(name):
    x, w = random_rows()
    assert np.isfinite(iqforge.decode(name, encode(name, x * np.float32(1e8), w), 1024)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_and_threads_do_not_matter(name):
    group = ggml_type(name).group_rows
    rows = 24 if group < 16 else 32
    x, w = random_rows(rows)
    whole = encode(name, x, w)
    assert np.array_equal(whole, encode(name, x, w, threads=3))
    for at in range(0, rows, 4 * group):
        assert np.array_equal(whole[at : at + group], encode(name, x[at : at + group], w))
    # Only ratios of importances matter.
    assert np.array_equal(whole, encode(name, x, w * np.float32(1024)))


@pytest.mark.parametrize("name", QUANTIZED)
def test_huge_values_saturate_and_no_rows_are_no_rows(name):
    x = (
        np.random.default_rng(4)
        .standard_normal((ggml_type(name).group_rows, 1024))
        .astype(np.float32)
    )
    for factor in (1e5, 1e8, 1e20, 1e30):
        assert np.isfinite(
            iqforge.decode(name, encode(name, x * np.float32(factor)), 1024)
        ).all(), factor
        assert np.isfinite(
            iqforge.decode(name, encode(name, x * np.float32(factor), np.arange(1024.0)), 1024)
        ).all(), factor
    assert encode(name, x[:0]).shape == (0, ggml_type(name).row_bytes(1024))


def test_float_types_round_to_nearest():
    x, _ = random_rows(rows=2, n_cols=256)
    assert np.array_equal(iqforge.decode("F32", encode("F32", x), 256), x)
    assert np.array_equal(
        iqforge.decode("F16", encode("F16", x), 256), x.astype(np.float16).astype(np.float32)
    )
    assert np.abs(iqforge.decode("BF16", encode("BF16", x), 256) / x - 1).max() <= 2**-8


def test_bad_values_are_named():
    x, w = random_rows(rows=4, n_cols=256)
    x[2, 17] = np.nan
    with pytest.raises(NonFiniteError, match="row 2, column 17"):
        encode("IQ4_K", x, w)
    x[2, 17] = -np.inf
    with pytest.raises(NonFiniteError, match="-inf at row 2"):
        encode("Q8_0", x)
    x[2, 17] = 0
    with pytest.raises(ShapeError, match="negative"):
        encode("IQ4_K", x, -w)
    with pytest.raises(NonFiniteError, match="column 3"):
        encode("IQ4_K", x, np.where(np.arange(256) == 3, np.nan, w))
    with pytest.raises(ShapeError, match=r"\[128\], expected \[256\]"):
        encode("IQ4_K", x, w[:128])
    with pytest.raises(ShapeError, match="multiple of 256"):
        encode("IQ4_K", x[:, :100])
    with pytest.raises(ShapeError, match="row group"):
        encode("IQ4_K_R4", x[:3])
    with pytest.raises(UnsupportedTypeError, match="I2_S"):
        encode("I2_S", x)


def test_weights_are_positive_and_relative():
    w = prepare_weights(np.array([0.0, 1.0, 3.0, 0.0]), 4)
    assert (w > 0).all() and w[2] / w[1] == 3
    assert (prepare_weights(np.zeros(4), 4) == 1).all()

"""Decoding and interleaving against the reference's own bytes, all 32 bits compared."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import ShapeError, UnknownTypeError, UnsupportedTypeError
from iqforge.formats import grids, tables
from iqforge.formats.codecs import codec, floats
from iqforge.formats.codecs.codec import decodable_types, decode, deinterleave, interleave
from iqforge.formats.types import TYPES, ggml_type

from .shared import shared

DECODED = [name for name in codec.decodable_types() if name not in ("F32", "F16", "BF16")]
INTERLEAVED = [name for name in DECODED if ggml_type(name).base]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def random_rows(name: str, rows: int, n_cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (rows, ggml_type(name).row_bytes(n_cols)), dtype=np.uint8
    )


def test_every_type_but_integers_decodes():
    assert {kind.name for kind in TYPES.values()} - set(codec.decodable_types()) == {
        "F64",
        "I8",
        "I16",
        "I32",
        "I64",
        "I2_S",
    }


def test_every_type_of_the_format_description_is_covered():
    """Each type has golden values that its decoder reproduces, and a digest. I2_S has no rows, and
    floats have no block to describe.
    """
    described = {
        name
        for line in shared("spec/formats.md").read_text().splitlines()
        if line.startswith("### ")
        for name in re.findall(
            r"\b(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16_R16|I2_S)\w*", line.partition("(")[0]
        )
    }
    assert len(described) > 75
    golden = {path.stem for path in shared("golden").glob("*.npz")} - {"sources"}
    assert described | {"F16", "BF16"} == golden == {*codec.decodable_types(), "I2_S"} - {"F32"}
    assert stored_digests().keys() == {*codec.decodable_types(), "I2_S"}


@pytest.mark.parametrize("name", DECODED)
def test_golden_decode(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    assert same_bits(codec.decode(name, golden["rand_bytes"], 512), golden["rand_y"])
    values = [key for key in golden.files if key.startswith("y_")]
    for key in values:
        assert same_bits(codec.decode(name, golden["q_" + key[2:]], 1024), golden[key]), key
    digests = json.loads(str(golden["meta"])).get("sha256_y", {})
    for case, digest in digests.items():
        assert (
            hashlib.sha256(codec.decode(name, golden[f"q_{case}"], 1024).tobytes()).hexdigest()
            == digest
        ), case
    assert values


@pytest.mark.parametrize("name", INTERLEAVED)
def test_golden_interleave(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    if "plain_bytes" in golden:
        plain, packed = golden["plain_bytes"], golden["packed_bytes"]
        assert same_bits(codec.decode(name, packed, 512), golden["packed_y"])
        n_cols = 512
    else:  # the old ARM layouts, for which the reference has a quantizer only
        plain, packed = (
            np.load(shared(f"golden/{ggml_type(name).base}.npz"))["q_gauss_no"],
            golden["q_gauss_no"],
        )
        n_cols = 1024
    assert np.array_equal(codec.interleave(name, plain, n_cols), packed)
    assert np.array_equal(codec.deinterleave(name, packed, n_cols), plain)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_golden_floats(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    x, bits = golden["x"].reshape(1, -1), golden["bits"].reshape(1, -1)
    ours = codec.encode_float(name, x).view(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(ours[~nan], bits[~nan])
    assert np.isnan(codec.decode(name, ours.view(np.uint8), x.size)[nan]).all()


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleave_undoes_exactly(name):
    kind = ggml_type(name)
    plain = random_rows(kind.base, 6 * kind.group_rows, 512, seed=5)
    if name == "Q8_KV_R8":  # the sum of the row's codes is left out, and computed again
        plain[:, 4:8] = plain[:, 8:].view(np.int8).sum(axis=1, dtype="<i4")[:, None].view(np.uint8)
    packed = codec.interleave(name, plain, 512)
    assert packed.shape == (len(plain), kind.row_bytes(512))
    assert not np.array_equal(packed[:, : plain.shape[1]], plain[:, : packed.shape[1]])
    assert np.array_equal(codec.deinterleave(name, packed, 512), plain)
    assert np.array_equal(codec.interleave(name, plain, 512, threads=4), packed)
    assert np.array_equal(codec.deinterleave(name, packed, 512, threads=4), plain)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_rows_have_the_values_of_plain_rows(name):
    kind = ggml_type(name)
    plain = random_rows(kind.base, kind.group_rows, 512, seed=7)
    expected = codec.decode(kind.base, plain, 512)
    assert np.array_equal(
        codec.decode(name, codec.interleave(name, plain, 512), 512), expected, equal_nan=True
    )


def test_i2_s_is_read_as_a_whole():
    golden = np.load(shared("golden/I2_S.npz"))
    assert same_bits(codec.decode_tensor("I2_S", golden["rand_bytes"], (4096,)), golden["rand_y"])
    assert same_bits(
        codec.decode_tensor("I2_S", golden["rand_bytes"], (8, 512)),
        golden["rand_y"].reshape(8, 512),
    )
    with pytest.raises(UnsupportedTypeError, match="decode_tensor"):
        codec.decode("I2_S", np.zeros((1, 128), np.uint8), 512)
    with pytest.raises(ShapeError, match="1056"):
        codec.decode_tensor("I2_S", golden["rand_bytes"][:-1], (4096,))
    with pytest.raises(ShapeError, match="128"):
        codec.decode_tensor("I2_S", np.zeros(32 + 16, np.uint8), (64,))


def test_i2_s_of_known_codes():
    data = np.zeros(64, dtype=np.uint8)
    data[5], data[32:36] = 0b00011011, np.array([0.5], dtype="<f4").view(np.uint8)
    y = codec.decode_tensor("I2_S", data, (2, 64))
    assert [float(v) for v in y.ravel()[5::32]] == [-0.5, 0.0, 0.5, 1.0]
    assert (np.delete(y.ravel(), [5, 37, 69, 101]) == -0.5).all()


def test_tensors_of_rows_decode_as_a_whole():
    data = random_rows("IQ4_KS", 6, 512, seed=8)
    assert same_bits(
        codec.decode_tensor("IQ4_KS", data.ravel(), (2, 3, 512)).reshape(6, 512),
        codec.decode("IQ4_KS", data, 512),
    )


def test_iq6_k_has_two_readings():
    golden = np.load(shared("golden/IQ6_K.npz"))
    assert same_bits(
        codec.decode("IQ6_K", golden["rand_bytes"], 512, as_weights=True), golden["rand_y_table"]
    )
    assert not same_bits(golden["rand_y"], golden["rand_y_table"])


def test_iq6_k_table_is_the_cubic_rounded():
    assert np.array_equal(np.rint(tables.IQ6NL_CUBIC[:64]), tables.IQ6NL_VALUES[:64])


@pytest.mark.parametrize(
    "name, factor", [("IQ2_KT", 1.05), ("IQ3_KT", 1.01), ("IQ4_KT", 1), ("IQ4_K", 1)]
)
def test_product_factors(name, factor):
    data = random_rows(name, 2, 512, seed=9)
    data[:, :4] = np.array([1.5], dtype="<f4").view(np.uint8)
    y = codec.decode(name, data, 512)
    assert same_bits(codec.decode(name, data, 512, as_weights=True), y * np.float32(factor))


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"])
def test_grids_are_those_of_the_gguf_package(name):
    quants = pytest.importorskip("gguf.quants")
    theirs = getattr(quants, name)
    theirs.init_grid()
    assert np.array_equal(getattr(grids, f"{name}_GRID"), theirs.grid[0, 0])


def decoded_digest(name: str) -> str:
    """Return the SHA-256 of 32 decoded rows of fixed random bytes, with NaN as 0 (its payload
    depends on the processor).
    """
    if ggml_type(name).tail_bytes:
        tail = np.concatenate(
            [np.array([-0.37], dtype="<f4").view(np.uint8), np.zeros(28, np.uint8)]
        )
        y = codec.decode_tensor(
            name, np.concatenate([random_rows(name, 32, 512, seed=11).ravel(), tail]), (32, 512)
        )
    else:
        y = codec.decode(name, random_rows(name, 32, 512, seed=11), 512)
    return hashlib.sha256(np.where(np.isnan(y), np.float32(0), y).tobytes()).hexdigest()


def stored_digests() -> dict[str, str]:
    return json.loads(Path(__file__).with_name("decode_digests.json").read_text())


@pytest.mark.parametrize("name", [*codec.decodable_types(), "I2_S"])
def test_decode_digest(name):
    """The digests were stored when the decoders had passed the tests with the reference's data, so
    a clone can test itself without that data.
    """
    assert decoded_digest(name) == stored_digests()[name]


def test_threads_do_not_matter():
    data = random_rows("IQ4_K_R4", 64, 512, seed=6)
    assert same_bits(
        codec.decode("IQ4_K_R4", data, 512), codec.decode("IQ4_K_R4", data, 512, threads=3)
    )


@pytest.mark.parametrize("name", ["I32", "F64", "I2_S"])
def test_types_without_rows_of_numbers_are_named(name):
    with pytest.raises(UnsupportedTypeError, match=name):
        codec.decode(name, np.zeros((1, ggml_type(name).row_bytes(512)), np.uint8), 512)


@pytest.mark.parametrize(
    "name, why",
    [
        ("IQ4_K", "not a row-interleaved"),
        ("IQ1_S_R4", "no plain type"),
        ("Q8_K_R8", "no plain type"),
    ],
)
def test_types_that_cannot_be_interleaved_are_named(name, why):
    with pytest.raises(UnsupportedTypeError, match=why):
        codec.interleave(name, random_rows(name, 8, 512, seed=1), 512)


def test_wrong_shapes_are_named():
    with pytest.raises(ShapeError, match="multiple of 256"):
        codec.decode("IQ4_K", np.zeros((1, 144), np.uint8), 128)
    with pytest.raises(ShapeError, match="uint8"):
        codec.decode("IQ4_K", np.zeros((1, 143), np.uint8), 256)
    with pytest.raises(ShapeError, match="row group"):
        codec.decode("IQ4_K_R4", np.zeros((3, 144), np.uint8), 256)
    with pytest.raises(UnknownTypeError, match="IQ4_K"):
        codec.decode("IQ4_KK", np.zeros((1, 144), np.uint8), 256)
    with pytest.raises(ShapeError, match="multiple of 2"):
        codec.decode("BF16_R16", np.zeros((16, 6), np.uint8), 3)


@pytest.mark.parametrize(
    "name", [name for name in decodable_types() if ggml_type(name).is_interleaved]
)
def test_no_rows(name):
    n_cols = 256
    type = ggml_type(name)
    empty = np.zeros((0, type.row_bytes(n_cols)), dtype=np.uint8)
    assert decode(name, empty, n_cols).shape == (0, n_cols)
    if type.base:
        plain = deinterleave(name, empty, n_cols)
        assert (
            plain.shape == (0, ggml_type(type.base).row_bytes(n_cols))
            and interleave(name, plain, n_cols).shape == empty.shape
        )


def test_large_float_arrays_are_encoded_as_small_ones():
    """Compiled loops agree with numpy's expressions at every boundary between two F16 values, and
    on patterns of all kinds.
    """
    halves = (
        np.arange(65536, dtype=np.uint16)
        .view(np.float16)
        .astype(np.float32)
        .view(np.uint32)
        .astype(np.int64)
    )
    near = [halves + step for step in (-1, 0, 1, 0x7FF, 0x800, 0xFFF, 0x1000, 0x1001)]
    others = np.random.default_rng(0).integers(0, 2**32, 1 << 18)
    patterns = np.concatenate([*near, others, np.arange(0x33000000 - 9999, 0x33000000 + 9999)])
    x = (patterns % 2**32).astype(np.uint32).view(np.float32)
    x = x[: x.size // 8 * 8].reshape(-1, 8)
    assert x.size >= floats._COMPILED_FROM > x[:1000].size
    for encode in (floats.encode_f16, floats.encode_bf16):
        assert np.array_equal(
            encode(x),
            np.concatenate([encode(x[start : start + 1000]) for start in range(0, len(x), 1000)]),
        )

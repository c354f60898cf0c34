"""Decoding and interleaving against the reference's own bytes, all 32 bits compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from iqforge.errors import ShapeError, UnknownTypeError, UnsupportedTypeError
from iqforge.formats import codec
from iqforge.formats.types import TYPES, ggml_type

from .shared import shared

DECODED = [name for name in codec.decodable_types() if name not in ("F32", "F16", "BF16")]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", DECODED)
def test_golden_decode(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    assert same_bits(codec.decode(name, golden["rand_bytes"], 512), golden["rand_y"])
    checked = 0
    for key in golden.files:
        if key.startswith("y_"):
            assert same_bits(codec.decode(name, golden["q_" + key[2:]], 1024), golden[key]), key
            checked += 1
    digests = json.loads(str(golden["meta"])).get("sha256_y", {})
    assert checked or digests


@pytest.mark.parametrize("name", [n for n in DECODED if ggml_type(n).is_interleaved])
def test_golden_interleave(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    assert np.array_equal(codec.interleave(name, golden["plain_bytes"], 512), golden["packed_bytes"])
    assert np.array_equal(codec.deinterleave(name, golden["packed_bytes"], 512), golden["plain_bytes"])
    assert same_bits(codec.decode(name, golden["packed_bytes"], 512), golden["packed_y"])


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_golden_floats(name):
    golden = np.load(shared(f"golden/{name}.npz"))
    x, bits = golden["x"].reshape(1, -1), golden["bits"].reshape(1, -1)
    ours = codec.encode_float(name, x).view(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(ours[~nan], bits[~nan])
    assert np.isnan(codec.decode(name, ours.view(np.uint8), x.size)[nan]).all()


@pytest.mark.parametrize("name", [n for n in DECODED if ggml_type(n).is_interleaved])
def test_interleave_undoes_exactly(name):
    kind = ggml_type(name)
    plain = np.random.default_rng(5).integers(0, 256, (2 * kind.group_rows, ggml_type(kind.base).row_bytes(512)), dtype=np.uint8)
    packed = codec.interleave(name, plain, 512)
    assert not np.array_equal(packed, plain)
    assert np.array_equal(codec.deinterleave(name, packed, 512), plain)


def decoded_digest(name: str) -> str:
    """SHA-256 of what 32 rows of fixed random bytes decode to, NaN counted as 0 (its payload depends on the processor)."""
    data = np.random.default_rng(11).integers(0, 256, (32, ggml_type(name).row_bytes(512)), dtype=np.uint8)
    y = codec.decode(name, data, 512)
    return hashlib.sha256(np.where(np.isnan(y), np.float32(0), y).tobytes()).hexdigest()


@pytest.mark.parametrize("name", DECODED)
def test_decode_digest(name):
    """Digests were stored when the decoders had passed the reference's data, so a clone can check itself without them."""
    stored = json.loads(Path(__file__).with_name("decode_digests.json").read_text())
    assert decoded_digest(name) == stored[name]


def test_threads_do_not_matter():
    data = np.random.default_rng(6).integers(0, 256, (64, ggml_type("IQ4_K_R4").row_bytes(512)), dtype=np.uint8)
    assert same_bits(codec.decode("IQ4_K_R4", data, 512), codec.decode("IQ4_K_R4", data, 512, threads=3))


def test_every_type_decodes_or_says_why():
    for kind in TYPES.values():
        data = np.zeros((kind.group_rows, kind.row_bytes(512)), dtype=np.uint8)
        try:
            assert codec.decode(kind.name, data, 512).shape == (kind.group_rows, 512)
        except UnsupportedTypeError as error:
            assert kind.name in str(error)


def test_wrong_shapes_are_named():
    with pytest.raises(ShapeError, match="multiple of 256"):
        codec.decode("IQ4_K", np.zeros((1, 144), np.uint8), 128)
    with pytest.raises(ShapeError, match="uint8"):
        codec.decode("IQ4_K", np.zeros((1, 143), np.uint8), 256)
    with pytest.raises(ShapeError, match="row group"):
        codec.decode("IQ4_K_R4", np.zeros((3, 144), np.uint8), 256)
    with pytest.raises(UnknownTypeError, match="IQ4_K"):
        codec.decode("IQ4_KK", np.zeros((1, 144), np.uint8), 256)

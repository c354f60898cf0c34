"""Decoding with torch against the compiled decoders and the reference's own values, all 32 bits
compared.
"""

from __future__ import annotations

import subprocess
import sys

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import ShapeError, UnsupportedTypeError
from iqforge.formats.codecs import codec, torch_decode
from iqforge.formats.codecs.torch_decode import decode_tensor_torch, decode_torch
from iqforge.formats.types import ggml_type

from .shared import shared

TYPES = codec.decodable_types()
WEIGHTS = ["IQ6_K", "IQ2_KT", "IQ3_KT", "IQ4_K"]
ON_GPU = [
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    )
]


def same(ours: torch.Tensor, expected: np.ndarray) -> bool:
    """Check that all bits are equal, except the payload and sign of NaN, which depend on the
    processor.
    """
    found = ours.cpu().numpy()
    nan, bits = np.isnan(expected), [y.view(np.uint32) for y in (found, expected)]
    return (
        found.dtype == np.float32
        and np.array_equal(nan, np.isnan(found))
        and np.array_equal(bits[0][~nan], bits[1][~nan])
    )


def random_rows(name: str, rows: int, n_cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (rows, ggml_type(name).row_bytes(n_cols)), dtype=np.uint8
    )


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
@pytest.mark.parametrize("name", TYPES)
def test_as_the_compiled_decoder(name, device):
    for rows, n_cols in ((32, 512), (16, 256)):
        data = random_rows(name, rows, n_cols, seed=rows)
        assert same(
            decode_torch(name, torch.from_numpy(data).to(device), n_cols),
            codec.decode(name, data, n_cols),
        )


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
@pytest.mark.parametrize("name", WEIGHTS)
def test_as_weights(name, device):
    data = random_rows(name, 16, 512, seed=4)
    assert same(
        decode_torch(name, torch.from_numpy(data).to(device), 512, as_weights=True),
        codec.decode(name, data, 512, as_weights=True),
    )


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("F32", "F16", "BF16")])
def test_golden(name, device):
    golden = np.load(shared(f"golden/{name}.npz"))
    for data, y, n_cols in (
        ("rand_bytes", "rand_y", 512),
        ("packed_bytes", "packed_y", 512),
        ("q_edge_no", "y_edge_no", 1024),
    ):
        if y in golden:
            assert same(
                decode_torch(name, torch.from_numpy(golden[data]).to(device), n_cols), golden[y]
            ), y


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
def test_i2_s(device):
    data = random_rows("I2_S", 1, 4 * 1024, seed=5)[0]
    data = np.concatenate(
        [data, np.array([-0.37], dtype="<f4").view(np.uint8), np.zeros(28, np.uint8)]
    )
    there = torch.from_numpy(data).to(device)
    assert same(
        decode_tensor_torch("I2_S", there, (8, 512)), codec.decode_tensor("I2_S", data, (8, 512))
    )
    rows = random_rows("IQ4_K", 6, 256, seed=6)
    assert same(
        decode_tensor_torch("IQ4_K", torch.from_numpy(rows).to(device).reshape(-1), (2, 3, 256)),
        codec.decode_tensor("IQ4_K", rows.ravel(), (2, 3, 256)),
    )


@pytest.mark.parametrize("name", ["IQ4_K", "IQ4_KS_R4", "Q8_0", "BF16_R16", "F16"])
def test_pieces_and_views(name, monkeypatch):
    data = random_rows(name, 32, 512, seed=7)
    expected = codec.decode(name, data, 512)
    # Not contiguous.
    padded = torch.from_numpy(np.concatenate([data, data], axis=1))[:, : data.shape[1]]
    monkeypatch.setattr(torch_decode, "PIECE_ELEMENTS", 3000)
    assert same(decode_torch(name, padded, 512), expected)
    # Not aligned.
    flat = torch.from_numpy(np.concatenate([np.zeros(1, np.uint8), data.ravel()]))[1:]
    assert same(decode_torch(name, flat.reshape(data.shape), 512), expected)
    assert decode_torch(name, torch.from_numpy(data[:0]), 512).shape == (0, 512)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_default_dtype_plays_no_role(kind):
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        for name in ("IQ1_S", "IQ1_M", "MXFP4", "NVFP4", "IQ3_KT", "Q8_K_R16"):
            data = random_rows(name, 16, 512, seed=8)
            assert same(
                decode_torch(name, torch.from_numpy(data), 512), codec.decode(name, data, 512)
            )
    finally:
        torch.set_default_dtype(before)


def test_other_dtypes():
    data = torch.from_numpy(
        iqforge.encode(
            "IQ4_K", np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
        )
    )
    y = decode_torch("IQ4_K", data, 256)
    assert torch.equal(decode_torch("IQ4_K", data, 256, dtype=torch.bfloat16), y.to(torch.bfloat16))
    assert decode_torch("IQ4_K", data, 256, dtype=torch.float16).dtype == torch.float16
    assert torch.equal(iqforge.decode_torch("iq4_k", data, 256), y)


def test_torch_is_not_imported_with_the_package():
    code = (
        "import sys, iqforge, iqforge.cli, iqforge.api; iqforge.api.decodable_types();"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_goes_wrong():
    with pytest.raises(ShapeError, match="uint8"):
        decode_torch("IQ4_K", torch.zeros((1, 143), dtype=torch.uint8), 256)
    with pytest.raises(ShapeError, match="row group"):
        decode_torch("IQ4_K_R4", torch.zeros((3, 144), dtype=torch.uint8), 256)
    with pytest.raises(ShapeError, match="multiple of 2"):
        decode_torch("BF16_R16", torch.zeros((16, 6), dtype=torch.uint8), 3)
    with pytest.raises(ShapeError, match="128"):
        decode_tensor_torch("I2_S", torch.zeros(32 + 16, dtype=torch.uint8), (64,))
    for name in ("I2_S", "I32", "F64"):
        with pytest.raises(UnsupportedTypeError, match=name):
            decode_torch(
                name, torch.zeros((1, ggml_type(name).row_bytes(512)), dtype=torch.uint8), 512
            )

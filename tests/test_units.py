"""Packed matrices lose nothing, and the unit of every type decodes to the bits of
`formats.codecs.codec`, on the CPU by g++ and on a GPU.
"""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from iqforge.cuda_kernels.compile.grids import shared_bytes
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.layouts import table as layouts
from iqforge.cuda_kernels.layouts.layout import bits
from iqforge.cuda_kernels.packed import pack
from iqforge.cuda_kernels.packed.decode import decode_matrix, decode_rows, unpack_rows
from iqforge.cuda_kernels.packed.matrix import packed_bytes
from iqforge.cuda_kernels.packed.pack import StoredRows, pack_matrix
from iqforge.errors import ShapeError, UnsupportedTypeError
from iqforge.formats.codecs import codec
from iqforge.formats.types import TYPES, ggml_type

from .host_library import host_library

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
PACKED = layouts.packed_types()
STORED = [name for name, type in TYPES.items() if layouts.plain_type(type).name in PACKED]
ROWS = 32  # a multiple, also halved, of every row group


def columns(type) -> int:
    return 3 * max(type.block_size, layouts.UNIT, 64)


def random_rows(type, rows, cols, seed=0):
    """Return random bytes, with every exponent of a float, so that some are not finite."""
    return np.random.default_rng(seed).integers(
        0, 256, (rows, type.row_bytes(cols)), dtype=np.uint8
    )


def same_bits(a, b):
    """Check that all bits are equal, except those of a NaN."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return np.array_equal(
        np.where(np.isnan(a), 0, a.view(np.uint32)), np.where(np.isnan(b), 0, b.view(np.uint32))
    )


def expected(type, rows, cols):
    with np.errstate(all="ignore"):
        return codec.decode(type, rows, cols, as_weights=True)


@pytest.mark.parametrize("name", STORED)
def test_packing_loses_nothing(name):
    """Unpacking a matrix gives the packed rows, or the plain type's rows if it was interleaved."""
    type = ggml_type(name)
    cols = columns(type)
    rows = random_rows(type, ROWS, cols)
    matrix = pack_matrix(type, [rows[: ROWS // 2], rows[ROWS // 2 :]], ROWS, cols, device="cpu")
    assert matrix.nbytes == packed_bytes(type, ROWS, cols)
    assert same_bits(decode_matrix(matrix, torch.float32).numpy(), expected(type, rows, cols))
    dropped = (
        sum(n for n_, n, per_row in matrix.layout.planes if per_row) < matrix.type.header_bytes
    )
    if not type.is_interleaved and not dropped:
        assert np.array_equal(unpack_rows(matrix), rows)


def test_every_type_has_a_unit():
    assert set(STORED) == set(codec.decodable_types())


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def test_pieces_must_fit():
    type = ggml_type("IQ4_K")
    rows = random_rows(type, 4, 512)
    with pytest.raises(ShapeError, match="more than 3 rows"):
        pack_matrix(type, [rows], 3, 512, device="cpu")
    with pytest.raises(ShapeError, match="4 rows of IQ4_K, expected 5"):
        pack_matrix(type, [rows], 5, 512, device="cpu")
    with pytest.raises(ShapeError, match=r"uint8\[rows, 288\]"):
        pack_matrix(type, [rows[:, :-1]], 4, 512, device="cpu")
    with pytest.raises(UnsupportedTypeError, match="rows of 100 elements"):
        pack_matrix(type, [rows], 4, 100, device="cpu")


@pytest.mark.parametrize("name", ["IQ4_K", "Q4_0_R8"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_read_where_they_are_needed(name, device, monkeypatch):
    """Threads read whole groups of rows, every row once."""
    type = ggml_type(name)
    rows, asked = random_rows(type, 48, 512), []

    def read(first: int, out: np.ndarray) -> None:
        asked.append((first, len(out)))
        out[:] = rows[first : first + len(out)]

    monkeypatch.setattr(pack, "_PIECE_BYTES", 16 * rows.shape[1])
    monkeypatch.setattr(pack, "_LEAST_SHARED", 0)
    stored = StoredRows(48, rows.shape[1], read)
    packed = pack_matrix(type, [stored.part(8, 40), stored.part(0, 8)], 48, 512, device=device)
    expected = pack_matrix(type, [rows[8:], rows[:8]], 48, 512, device="cpu")
    assert torch.equal(packed.data.cpu(), expected.data)
    assert sum(n for _, n in asked) == 48
    assert all(first % type.group_rows == n % type.group_rows == 0 for first, n in asked)
    with pytest.raises(ShapeError, match="48 rows of 9 bytes"):
        pack_matrix(type, [StoredRows(48, 9, read)], 48, 512, device="cpu")


def test_layouts_are_checked(monkeypatch):
    type = ggml_type("Q8_0")
    whole = layouts._layouts()["Q8_0"]
    layouts.packed_layout.cache_clear()
    twice = (bits(0, 0, 16), "codes", bits(0, 0, 16))
    for fields, message in (
        (lambda i: whole.fields(i)[:1], "one place for every bit"),
        (lambda i: whole.fields(i)[:1] + [twice], "two bits in one place"),
        (
            lambda i: [(*field, "sign code") for field in whole.fields(i)],
            "a field that is 'sign code'",
        ),
    ):
        monkeypatch.setattr(
            layouts,
            "_layouts",
            lambda fields=fields: {"Q8_0": layouts.BlockLayout(whole.planes, fields)},
        )
        with pytest.raises(RuntimeError, match=message):
            layouts.packed_layout(type)
    layouts.packed_layout.cache_clear()


HOST_PROGRAM = """
// What tensor cores multiply by tables of 16 has to be the same.
template <class T> bool agrees(const typename T::Raw& raw, int unit, const float (&v)[32]) {
  if constexpr (UnitSixteen<T>::value) {
    float s[2], c[2];
    T::terms(raw, unit, s, c);
    const uint4 q = T::codes(raw);
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    for (int i = 0; i < 32; ++i) {
      const int g = i * T::SCALES / 32, code = words[i / 8] >> 4 * (i % 8) & 15;
      const float found = (int8_t(T::Sixteen::word(code / 4) >> 8 * (code % 4)) + c[g]) * s[g];
      const bool near = std::fabs(found - v[i]) <= 1e-6f * std::fabs(v[i]);
      if (std::isfinite(v[i]) && !near) return false;
    }
  }
  return true;
}
template <class T> void decode_rows(const uint8_t* base, int64_t rows, int cols, float* out) {
  const Geometry g = T::geometry(rows, cols);
  prepare_unit<T>();
  for (int64_t row = 0; row < rows; ++row)
    for (int unit = 0; unit < g.units; ++unit) {
      float v[32];
      decode_unit<T>(T::load(base, g, row, unit), unit, v);
      if (!agrees<T>(T::load(base, g, row, unit), unit, v)) v[0] = NAN;
      memcpy(out + row * cols + 32 * unit, v, sizeof v);
    }
}
template <class T> int shared_bytes(...) { return 0; }
template <class T> int shared_bytes(typename T::Shared*) { return T::Shared::BYTES; }
"""


@pytest.fixture(scope="module")
def host_units(tmp_path_factory):
    """Return a library with decode_TYPE for every type, compiled by g++ from the kernels'
    headers.
    """
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed: the unit headers are not tried on the CPU")
    headers = tuple(dict.fromkeys(layouts.unit_header(ggml_type(name)) for name in PACKED))
    program = (
        f'#include "{Path(__file__).parent / "units_on_host.hpp"}"\n'
        + expand(headers)
        + HOST_PROGRAM
        + "".join(
            f'extern "C" void decode_{name}(const uint8_t* base, int64_t rows, int cols, float*'
            f' out) {{\n  decode_rows<{name}>(base, rows, cols, out);\n}}\nextern "C" int'
            f" shared_{name}() {{ return shared_bytes<{name}>(nullptr); }}\n"
            for name in PACKED
        )
    )
    return host_library(tmp_path_factory.mktemp("units") / "units", program)


@pytest.mark.parametrize("name", PACKED)
def test_units_on_the_cpu(host_units, name):
    type = ggml_type(name)
    cols = 2 * columns(type)
    rows = random_rows(type, ROWS, cols, seed=1)
    matrix = pack_matrix(type, [rows], ROWS, cols, device="cpu")
    values = np.full((ROWS, cols), 7.25, dtype=np.float32)
    getattr(host_units, f"decode_{name}")(
        ctypes.c_void_p(matrix.data.data_ptr()),
        ctypes.c_int64(ROWS),
        ctypes.c_int(cols),
        values.ctypes.data_as(ctypes.c_void_p),
    )
    assert same_bits(values, expected(type, rows, cols))
    assert getattr(host_units, f"shared_{name}")() == shared_bytes(type)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", STORED)
def test_decoding_on_a_gpu(name):
    type = ggml_type(name)
    cols, total = columns(type), 3 * ROWS
    rows = random_rows(type, total, cols, seed=2)
    matrix = pack_matrix(type, [rows[:ROWS], rows[ROWS:]], ROWS, cols, 3, device="cuda")
    assert torch.equal(
        matrix.data.cpu(), pack_matrix(type, [rows], ROWS, cols, 3, device="cpu").data
    )
    weights = torch.from_numpy(expected(type, rows, cols))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wanted = weights.to(dtype).float().numpy()
        out = torch.full((total, cols), 7.25, dtype=dtype, device="cuda")
        assert same_bits(decode_matrix(matrix, dtype, out=out).float().cpu().numpy(), wanted)
        assert same_bits(
            decode_matrix(matrix, dtype, first_row=5, n_rows=7).float().cpu().numpy(),
            wanted[5:12],
        )
        ids = torch.tensor([40, 3, 3, 17], device="cuda")
        assert same_bits(
            decode_rows(matrix, ids, dtype).float().cpu().numpy(), wanted[[40, 3, 3, 17]]
        )

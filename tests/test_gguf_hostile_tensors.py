"""GGUF files that lie about their tensors and data: each ends in a named error, at once and without
allocating what the file only claims to hold.
"""

from __future__ import annotations

import pytest
from iqforge.errors import (
    MalformedFileError,
    ShapeError,
    TruncatedFileError,
    UnknownTypeError,
)

from .ggufbuild import (
    U8,
    entry,
    gguf,
    pair,
    small,
)
from .hostile import refuser


@pytest.fixture
def hostile(tmp_path):
    return refuser(tmp_path / "hostile.gguf")


@pytest.mark.parametrize("n_dims", [0, 5, 2**31, 2**32 - 1])
def test_number_of_dimensions(hostile, n_dims):
    hostile(
        gguf(entries=[entry("t", [1] * 5, 0, 0, n_dims)], data=bytes(64)),
        MalformedFileError,
        str(n_dims),
        "'t'",
    )


@pytest.mark.parametrize("dims", [[0], [8, 0], [0, 0, 0, 0], [2**64 - 1], [2**63, 2]])
def test_impossible_dimension(hostile, dims):
    hostile(
        gguf(entries=[entry("t", dims, 0, 0)], data=bytes(64)), MalformedFileError, str(dims), "'t'"
    )


@pytest.mark.parametrize(
    "dims",
    [
        [2**63 - 64],
        [2**42 + 1, 2**22],
        [2**32, 2**32],
        [2**62, 4],
        [2**31, 2**31, 2, 2],
        [2**61 + 1, 8],
        [64, 2],
    ],
)
def test_more_elements_than_bytes(hostile, dims):
    """Products and sums of these wrap to something small in 64 bits."""
    hostile(
        gguf(entries=[entry("t", dims, 0, 0)], data=bytes(64)),
        TruncatedFileError,
        "'t'",
        "the file has",
    )


def test_sizes_whose_sum_wraps(hostile):
    entries = [entry("t", [2**63 - 64], 24, 0), entry("u", [2**63 - 64], 24, 2**63 - 64)]
    hostile(gguf(entries=entries, data=bytes(64)), TruncatedFileError)


@pytest.mark.parametrize("type_id", [4, 5, 37, 38, 142, 143, 9, 15, 43, 400, 2**31, 2**32 - 1])
def test_unknown_type(hostile, type_id):
    hostile(
        gguf(entries=[entry("t", [256, 16], type_id, 0)], data=bytes(8192)),
        UnknownTypeError,
        str(type_id),
        "'t'",
        "at byte",
    )


@pytest.mark.parametrize(
    "type_id, rows", [(339, 3), (337, 6), (202, 4), (230, 8), (398, 12), (31, 2), (33, 4)]
)
def test_rows_not_a_multiple_of_the_row_group(hostile, type_id, rows):
    hostile(
        gguf(entries=[entry("t", [256, rows], type_id, 0)], data=bytes(65536)),
        ShapeError,
        str(rows),
        "'t'",
    )


@pytest.mark.parametrize(
    "type_id, n_cols", [(8, 33), (12, 128), (139, 255), (2, 1), (40, 32), (144, 257)]
)
def test_row_not_a_multiple_of_the_block(hostile, type_id, n_cols):
    hostile(
        gguf(entries=[entry("t", [n_cols, 4], type_id, 0)], data=bytes(65536)),
        ShapeError,
        str(n_cols),
        "'t'",
    )


def test_duplicate_tensor(hostile):
    hostile(
        gguf(entries=[entry("t", [8], 0, 0), entry("t", [8], 0, 32)], data=bytes(64)),
        MalformedFileError,
        "'t'",
        "twice",
    )


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"n" * 64,
        b"n" * 70_000,
        b"../x",
        b"/etc/passwd",
        b"a/../b",
        b"..",
        b".",
        b"a//b",
        b"..\\x",
        b"a\0b",
        b"a\nb",
        b"\x1b[31m",
        b"\xff\xff",
    ],
)
def test_tensor_name(hostile, name):
    hostile(
        gguf(entries=[entry(name, [8], 0, 0)], data=bytes(64)), MalformedFileError, "tensor 1 of 1"
    )


@pytest.mark.parametrize("offset", [1, 16, 33])
def test_unaligned_data(hostile, offset):
    hostile(
        gguf(entries=[entry("t", [8], 0, offset)], data=bytes(96)),
        MalformedFileError,
        str(offset),
        "alignment 32",
    )


def test_overlapping_data(hostile):
    hostile(
        gguf(entries=[entry("t", [16], 0, 0), entry("u", [8], 0, 32)], data=bytes(96)),
        MalformedFileError,
        "offset 32 overlaps",
        "expected 64",
        "'t'",
        "'u'",
    )
    hostile(
        gguf(entries=[entry("t", [8], 0, 0), entry("u", [8], 0, 0)], data=bytes(96)),
        MalformedFileError,
        "overlaps",
    )


def test_data_out_of_order(hostile):
    entries = [entry("second", [8], 0, 32), entry("first", [8], 0, 0)]
    hostile(
        gguf(entries=entries, data=bytes(64)),
        MalformedFileError,
        "'second'",
        "offset 32",
        "expected 0",
        "out of order",
    )
    entries = [entry("a", [8], 0, 0), entry("c", [8], 0, 64), entry("b", [8], 0, 32)]
    hostile(
        gguf(entries=entries, data=bytes(96)),
        MalformedFileError,
        "'c'",
        "offset 64",
        "expected 32",
        "'a'",
        "out of order",
    )


def test_gap_in_the_data(hostile):
    entries = [entry("t", [8], 0, 0), entry("u", [8], 0, 64)]
    hostile(
        gguf(entries=entries, data=bytes(96)),
        MalformedFileError,
        "'u'",
        "offset 64",
        "gap",
        "expected 32",
        "'t'",
    )
    hostile(
        gguf(entries=[entry("t", [8], 0, 32)], data=bytes(64)),
        MalformedFileError,
        "'t'",
        "offset 32",
        "gap",
        "expected 0",
    )


@pytest.mark.parametrize("n_bytes", [1, 7, 32, 10_000])
def test_bytes_after_the_data(hostile, n_bytes):
    whole = small()
    hostile(
        whole + bytes(n_bytes),
        MalformedFileError,
        f"{n_bytes} bytes follow",
        f"at byte {len(whole)}",
        "2 tensors",
    )
    hostile(
        gguf([pair("k", U8, 1)]) + bytes(n_bytes),
        MalformedFileError,
        f"{n_bytes} bytes follow",
        "0 tensors",
    )
    unaligned = gguf(entries=[entry("t", [1], 0, 0)], data=bytes(32))
    hostile(unaligned + bytes(n_bytes), MalformedFileError, f"{n_bytes} bytes follow")


@pytest.mark.parametrize("offset", [96, 2**40, 2**63, 2**64 - 32])
def test_data_beyond_the_end(hostile, offset):
    hostile(
        gguf(entries=[entry("t", [8], 0, offset)], data=bytes(96)),
        MalformedFileError,
        str(offset),
        "'t'",
    )


@pytest.mark.parametrize("missing", [1, 63, 64, 100])
def test_truncated_data(hostile, missing):
    hostile(small()[:-missing], TruncatedFileError, "'t")

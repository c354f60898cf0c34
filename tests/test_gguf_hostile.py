"""GGUF files with hostile headers and keys, and files that are cut or damaged anywhere: each ends
in a named error, at once and without allocating what the file only claims to hold.
"""

from __future__ import annotations

import os
import random
import struct
import time

import pytest
from iqforge.errors import (
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    TruncatedFileError,
)
from iqforge.formats.gguf.reader import open_gguf

from .ggufbuild import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    array_pair,
    entry,
    gguf,
    pair,
    small,
    text,
)
from .hostile import refused, refuser

HUGE = 2**64 - 1


@pytest.fixture
def hostile(tmp_path):
    return refuser(tmp_path / "hostile.gguf")


@pytest.mark.parametrize("content", [b"", b"G", b"GGU"])
def test_shorter_than_the_magic(hostile, content):
    hostile(content, TruncatedFileError, "24")


@pytest.mark.parametrize("length", range(4, 24))
def test_ends_inside_the_counts(hostile, length):
    hostile(small()[:length], TruncatedFileError)


def test_wrong_magic(hostile):
    hostile(gguf(magic=b"FUGG"), MalformedFileError, "FUGG")
    hostile(gguf(magic=b"GGML"), MalformedFileError, "GGML")


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_unsupported_version(hostile, version):
    hostile(gguf(version=version), MalformedFileError, f"version {version}", "at byte 4")


def test_big_endian(hostile):
    hostile(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), MalformedFileError, "big-endian")


@pytest.mark.parametrize("count", [HUGE, 2**63, 2**32, 100])
def test_more_tensors_or_pairs_than_bytes(hostile, count):
    hostile(gguf(n_tensors=count), TruncatedFileError, str(count), "tensors")
    hostile(gguf(n_pairs=count), TruncatedFileError, str(count), "pairs")


def test_more_pairs_than_follow(hostile):
    hostile(
        gguf([pair("a", U32, 1)] * 1, data=bytes(64), n_pairs=3), MalformedFileError, "key 2 of 3"
    )


@pytest.mark.parametrize(
    "length, error",
    [
        (0, MalformedFileError),
        (65_536, MalformedFileError),
        (HUGE, MalformedFileError),
        (60_000, TruncatedFileError),
    ],
)
def test_key_length(hostile, length, error):
    hostile(gguf([text(b"k", length) + struct.pack("<I", U8) + b"\0"]), error, str(length))


def test_key_that_is_really_too_long(hostile):
    hostile(gguf([pair("k" * 65_536, U8, 1)]), MalformedFileError, "65536")


@pytest.mark.parametrize(
    "key",
    [
        b"\xff\xfe",
        b"a\0b",
        b"a\nINFO: all is well",
        b"\x1b[2Jgone",
        b"\xed\xa0\x80",
        b"a\x7f",
        "a\u202eb".encode(),
    ],
)
def test_key_that_must_not_be_printed(hostile, key):
    hostile(gguf([pair(key, U8, 1)]), MalformedFileError, "key 1 of 1", "\\")


def test_messages_stay_short(hostile):
    assert (
        len(
            str(
                hostile(
                    gguf([pair("k" * 60_000, STRING, "v"), text("k" * 60_000)], pad=False),
                    MalformedFileError,
                )
            )
        )
        < 1000
    )
    assert (
        len(
            str(
                hostile(
                    gguf([text("k" * 60_000) + struct.pack("<I", STRING) + text(b"v", HUGE)]),
                    TruncatedFileError,
                )
            )
        )
        < 1000
    )


@pytest.mark.parametrize("kind", [13, 14, 255, 2**31, 2**32 - 1])
def test_unknown_value_type(hostile, kind):
    hostile(
        gguf([text("k") + struct.pack("<I", kind) + bytes(16)]),
        MalformedFileError,
        str(kind),
        "'k'",
    )
    hostile(
        gguf([text("k") + struct.pack("<IIQ", ARRAY, kind, 1) + bytes(16)]),
        MalformedFileError,
        str(kind),
    )


def test_arrays_of_arrays_without_end(hostile):
    nested = array(U8, [1])
    for _ in range(1000):
        nested = array(ARRAY, nested, 1)
    hostile(gguf([text("k") + struct.pack("<I", ARRAY) + nested]), MalformedFileError, "nests")


@pytest.mark.parametrize("element", [U8, U32, U64, STRING, ARRAY, BOOL])
@pytest.mark.parametrize("count", [HUGE, 2**63, 2**62, 2**61, 10**6])
def test_array_longer_than_the_file(hostile, element, count):
    hostile(
        gguf([array_pair("k", element, bytes(64), count)]), TruncatedFileError, str(count), "'k'"
    )


@pytest.mark.parametrize("length", [HUGE, 2**63, 2**40, 1000])
def test_string_longer_than_the_file(hostile, length):
    hostile(
        gguf([text("k") + struct.pack("<I", STRING) + text(b"v", length)]),
        TruncatedFileError,
        str(length),
        "'k'",
    )
    hostile(
        gguf([array_pair("k", STRING, text(b"v", length), 1)]),
        TruncatedFileError,
        str(length),
        "'k'",
    )


def test_string_array_that_runs_out(hostile):
    hostile(
        gguf([array_pair("k", STRING, text("x" * 40) + bytes(3), 3)], pad=False),
        TruncatedFileError,
        "string 2",
    )


def test_duplicate_key(hostile):
    hostile(gguf([pair("k", U8, 1), pair("k", U8, 1)]), MalformedFileError, "'k'", "twice")


@pytest.mark.parametrize("value", [0, 1, 3, 13, 4, 48, 2**31, 2**32 - 1])
def test_impossible_alignment(hostile, value):
    hostile(
        gguf([pair("general.alignment", U32, value)]),
        MalformedFileError,
        "general.alignment",
        str(value),
    )


@pytest.mark.parametrize(
    "kind, value", [(I32, 32), (STRING, "32"), (U64, 32), (U16, 32), (F32, 32.0)]
)
def test_alignment_of_another_type(hostile, kind, value):
    hostile(
        gguf([pair("general.alignment", kind, value)]),
        MalformedFileError,
        "general.alignment",
        "UINT32",
    )


def test_bool_two(hostile):
    hostile(gguf([pair("k", BOOL, 2)]), MalformedFileError, "bool 2")
    hostile(gguf([array_pair("k", BOOL, [0, 1, 255])]), MalformedFileError, "bool 255")


def test_truncated_anywhere(tmp_path):
    """Every shorter version of a file is an error, and none needs more than a moment."""
    whole = small(
        3,
        [
            array_pair("tokenizer.ggml.tokens", STRING, ["a", "bc", ""]),
            array_pair("scores", F32, [1.0, 2.0]),
        ],
    )
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    open_gguf(path).close()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TruncatedFileError):
            open_gguf(path)


def test_sparse_terabytes_after_a_tiny_header(tmp_path):
    path, size = tmp_path / "sparse.gguf", 10 * 2**40

    def sparse(head: bytes) -> None:
        path.write_bytes(head)
        try:
            os.truncate(path, size)
        except OSError as error:
            pytest.skip(f"no sparse files of 10 TB here: {error}")

    sparse(gguf(n_pairs=2**38))
    refused(path, MalformedFileError, "key 1 of")
    sparse(gguf(n_tensors=2**37))
    refused(path, MalformedFileError, "tensor 1 of")
    sparse(gguf([text("k") + struct.pack("<IIQ", ARRAY, U8, 2**42)]))
    refused(path, MalformedFileError, str(2**42))
    sparse(gguf([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**39)]))
    refused(path, MalformedFileError, str(2**39))
    sparse(gguf([text("k") + struct.pack("<IQ", STRING, 2**42)]))
    refused(path, MalformedFileError, str(2**42))
    sparse(gguf(entries=[entry("t", [2**44], 24, 0)]))
    refused(path, TruncatedFileError, "'t'")
    sparse(small())
    refused(path, MalformedFileError, f"{size - len(small())} bytes follow")


def test_not_a_file(tmp_path):
    refused(tmp_path / "absent.gguf", NotFoundError)
    refused(tmp_path, MalformedFileError, "folder")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", MalformedFileError, "regular file")
    with pytest.raises(IqforgeError):
        open_gguf("a\0b.gguf")


def test_random_damage(tmp_path):
    """Flipped, cut, inserted and swapped bytes give an IqforgeError, or a file that can be read to
    its last byte.
    """
    whole = small(
        3,
        [
            array_pair("tokenizer.ggml.tokens", STRING, ["a", "bc", ""]),
            array_pair("scores", F32, [1.0, 2.0]),
            pair("general.alignment", U32, 32),
            pair("flag", BOOL, 1),
            text("nested")
            + struct.pack("<I", ARRAY)
            + array(ARRAY, array(U8, [1, 2]) + array(I32, [3]), 2),
        ],
    )
    path, rng, slowest = tmp_path / "damaged.gguf", random.Random(7), 0.0
    interesting = [0, 1, 2, 4, 8, 9, 13, 255]
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(content) * 3 // 4)
            kind = rng.randrange(5)
            if kind == 0:
                content[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                content[at] = rng.choice(interesting)
            elif kind == 2:
                content[at : at + 8] = struct.pack(
                    "<Q", rng.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63, HUGE - 31, HUGE))
                )
            elif kind == 3:
                del content[at : at + rng.randrange(1, 9)]
            else:
                content[at:at] = rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(content)
        start = time.thread_time()  # other processes do not count
        try:
            with open_gguf(path) as file:
                for tensor in file.tensors:
                    file.read_rows(tensor, 0, tensor.n_rows).tobytes()
                    file.read_bytes(tensor, 0, tensor.n_bytes)
        except IqforgeError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        slowest = max(slowest, time.thread_time() - start)
    assert slowest < 1

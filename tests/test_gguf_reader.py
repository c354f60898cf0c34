"""Reading GGUF files: values and rows as stored, valid oddities, truncated files, split models, the
reference's files.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import IqforgeError, ShapeError, TruncatedFileError
from iqforge.formats.gguf import reader
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.types import ggml_type
from iqforge.formats.values import Value, ValueType

from .ggufbuild import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
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
from .shared import shared


@pytest.fixture
def opened(tmp_path):
    """Return a function from bytes to an open file."""
    files = []

    def make(content: bytes, name: str = "m.gguf"):
        (tmp_path / name).write_bytes(content)
        files.append(open_gguf(tmp_path / name))
        return files[-1]

    yield make
    for file in files:
        file.close()


def test_every_value_type(opened):
    scalars = {
        U8: 255,
        I8: -128,
        U16: 65535,
        I16: -32768,
        U32: 2**32 - 1,
        I32: -(2**31),
        F32: 0.5,
        BOOL: True,
        STRING: "Grüße 🙂",
        U64: 2**64 - 1,
        I64: -(2**63),
        F64: 0.1,
    }
    pairs = [pair(f"one.{kind}", kind, value) for kind, value in scalars.items()]
    pairs += [array_pair(f"many.{kind}", kind, [value, value]) for kind, value in scalars.items()]
    pairs += [
        array_pair("none", STRING, []),
        array_pair("no.numbers", F32, []),
        pair("empty", STRING, ""),
    ]
    metadata = opened(gguf(pairs)).metadata
    for kind, value in scalars.items():
        assert metadata[f"one.{kind}"] == Value(ValueType(kind), value)
        assert metadata[f"many.{kind}"] == Value(ValueType.ARRAY, [value, value], ValueType(kind))
        assert type(metadata[f"one.{kind}"].data) is type(value)
    assert metadata["none"] == Value(ValueType.ARRAY, [], ValueType.STRING)
    assert metadata["empty"].data == ""
    assert list(metadata)[:2] == ["one.0", "one.1"]


def test_strings_that_are_not_utf8_keep_their_bytes(opened):
    raw = b"\xff\x00a\xc3"
    metadata = opened(
        gguf([pair("s", STRING, raw), array_pair("a", STRING, text(raw) * 2, 2)])
    ).metadata
    assert metadata["s"].data.encode("utf-8", "surrogateescape") == raw
    assert [item.encode("utf-8", "surrogateescape") for item in metadata["a"].data] == [raw, raw]


def test_shallow_array_of_arrays(opened):
    nested = array(ARRAY, array(U8, [1, 2]) + array(STRING, ["x"]), 2)
    value = opened(gguf([text("k") + struct.pack("<I", ARRAY) + nested])).metadata["k"]
    assert [inner.data for inner in value.data] == [[1, 2], ["x"]]
    assert [inner.element for inner in value.data] == [ValueType.UINT8, ValueType.STRING]


def test_not_a_number_is_a_value(opened):
    metadata = opened(gguf([pair("nan", F32, math.nan), pair("inf", F64, -math.inf)])).metadata
    assert math.isnan(metadata["nan"].data) and metadata["inf"].data == -math.inf


@pytest.mark.parametrize("version", [2, 3])
def test_versions(opened, version):
    file = opened(gguf([pair("k", U8, 1)], version=version))
    assert file.version == version and file.tensors == () and file.metadata["k"].data == 1


def test_rows(opened):
    data = np.arange(48, dtype=np.float32)
    file = opened(gguf([], [entry("w", [4, 6, 2], 0, 0)], data.tobytes()))
    tensor = file.tensor("w")
    assert tensor.shape == (2, 6, 4) and tensor.n_rows == 12 and "w" in file and "x" not in file
    rows = file.read_rows(tensor, 3, 5)
    assert rows.shape == (2, 16) and rows.dtype == np.uint8 and not rows.flags.writeable
    assert rows.view(np.float32).tolist() == data.reshape(12, 4)[3:5].tolist()
    assert file.read_rows(tensor, 12, 12).shape == (0, 16)
    assert file.read_bytes(tensor, 8, 12).view(np.float32) == [2.0]
    for start, stop in ((-1, 2), (5, 3), (0, 13), (12, 13)):
        with pytest.raises(ShapeError, match="'w'"):
            file.read_rows(tensor, start, stop)
    with pytest.raises(IqforgeError, match="m.gguf.*'x'"):
        file.tensor("x")


def test_rows_are_read_into_memory_of_the_caller(opened):
    data = np.arange(48, dtype=np.float32)
    file = opened(gguf([], [entry("w", [4, 6, 2], 0, 0)], data.tobytes()))
    assert file.reads_in_place
    tensor = file.tensor("w")
    out = np.zeros((4, tensor.row_bytes), np.uint8)
    file.read_rows_into(tensor, 3, out[1:3])
    assert np.array_equal(out[1:3], file.read_rows(tensor, 3, 5))
    assert not out[0].any() and not out[3].any()
    with pytest.raises(ShapeError):
        file.read_rows_into(tensor, 10, out)


def test_interleaved_rows_come_in_groups(opened):
    kind = ggml_type("IQ4_K_R4")
    file = opened(gguf([], [entry("w", [256, 8], kind.id, 0)], bytes(8 * 144)))
    assert file.read_rows(file.tensor("w"), 4, 8).shape == (4, 144)
    with pytest.raises(ShapeError):
        file.read_rows(file.tensor("w"), 0, 2)


def test_bytes_after_the_last_row(opened):
    kind = ggml_type("I2_S")
    file = opened(gguf([], [entry("w", [64, 2], kind.id, 0)], bytes(32) + b"s" * 32))
    tensor = file.tensor("w")
    assert (
        file.read_rows(tensor, 0, 2).shape == (2, 16)
        and bytes(file.read_bytes(tensor, 32, 64)) == b"s" * 32
    )


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_stated_alignment(opened, alignment):
    data = b"a" * 4 + bytes(alignment - 4) + b"b" * 4
    file = opened(
        gguf(
            [pair("general.alignment", U32, alignment)],
            [entry("a", [1], 0, 0), entry("b", [1], 0, alignment)],
            data,
            alignment=alignment,
        )
    )
    assert file.alignment == alignment
    assert [bytes(file.read_rows(tensor, 0, 1)) for tensor in file.tensors] == [b"a" * 4, b"b" * 4]


def test_missing_padding_at_the_end(opened):
    entries = [entry("first", [1], 0, 0), entry("last", [1], 0, 32)]
    for padding in range(29):
        file = opened(
            gguf([], entries, b"1111" + bytes(28) + b"2222" + bytes(padding)), f"{padding}.gguf"
        )
        assert [bytes(file.read_rows(tensor, 0, 1)) for tensor in file.tensors] == [
            b"1111",
            b"2222",
        ]
    assert opened(gguf([pair("k", U8, 1)], pad=False), "unpadded.gguf").tensors == ()


def test_rows_outlive_the_file(opened):
    file = opened(small())
    rows = file.read_rows(file.tensor("t1"), 0, 2)
    file.release(file.tensor("t1"))
    file.close()
    file.close()
    gc.collect()
    assert rows.view(np.float32).tolist() == [[1.0] * 8] * 2
    with pytest.raises(IqforgeError, match="closed"):
        file.read_rows(file.tensor("t1"), 0, 2)


def test_reading_maps_and_keeps_nothing(tmp_path):
    """Memory holds only the rows that the caller keeps, and the file is in no mapping of the
    process.
    """
    path, n_bytes = tmp_path / "big.gguf", 24 << 20
    path.write_bytes(gguf([], [entry("w", [n_bytes], 24, 0)], bytes(n_bytes)))

    with open_gguf(path) as file:
        tensor = file.tensor("w")
        tracemalloc.start()
        for start in range(0, n_bytes, 1 << 20):
            assert int(file.read_bytes(tensor, start, start + (1 << 20)).max()) == 0
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
        assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("read", ["rows", "bytes"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, read):
    path = tmp_path / "cut.gguf"
    path.write_bytes(
        gguf([], [entry("a", [4096], 24, 0), entry("b", [4096], 24, 4096)], bytes(8192))
    )
    with open_gguf(path) as file:
        tensor, offset = file.tensor("b"), file.location("b")[1]
        os.truncate(path, offset + 100)
        with pytest.raises(TruncatedFileError) as raised:
            if read == "rows":
                file.read_rows(tensor, 0, 1)
            else:
                file.read_bytes(tensor, 64, 4000)
    error = raised.value
    assert (error.file, error.tensor, error.offset) == (str(path), "b", offset + 100)
    assert "ends here" in error.message


def test_headers_longer_than_one_read(opened, monkeypatch):
    """Any part of a header may be the first that is not in memory yet."""
    pairs = [
        pair("general.architecture", STRING, "llama"),
        array_pair("tokenizer.ggml.tokens", STRING, [f"tok{i}" for i in range(300)]),
        array_pair("flags", BOOL, [True, False] * 50),
        array_pair("types", I32, list(range(200))),
    ]
    content = gguf(pairs, [entry(f"t{i}", [8], 24, 32 * i) for i in range(30)], bytes(32 * 30))
    whole = opened(content, "whole.gguf")
    for guess in (4, 9, 24, 100, 1000):
        monkeypatch.setattr(reader, "_HEADER_GUESS", guess)
        file = opened(content, f"guess{guess}.gguf")
        assert (file.metadata, file.tensors) == (whole.metadata, whole.tensors)


def test_large_vocabulary_is_quick(opened, tmp_path):
    tokens = [f"tok{i}" for i in range(150_000)]
    content = gguf(
        [
            array_pair("tokenizer.ggml.tokens", STRING, tokens),
            array_pair("tokenizer.ggml.token_type", I32, [1] * 150_000),
        ]
    )
    start = time.thread_time()  # other processes do not count
    file = opened(content)
    assert time.thread_time() - start < 2  # 0.05 s on an idle core
    assert file.metadata["tokenizer.ggml.tokens"].data == tokens


def _split(no: int, count: int, n_tensors: int) -> list[bytes]:
    return [
        pair("split.no", U16, no),
        pair("split.count", U16, count),
        pair("split.tensors.count", I32, n_tensors),
    ]


def test_split_model(tmp_path):
    names = [tmp_path / f"my model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    names[0].write_bytes(gguf([pair("general.architecture", STRING, "llama"), *_split(0, 3, 2)]))
    names[1].write_bytes(gguf(_split(1, 3, 2), [entry("a", [1], 0, 0)], b"aaaa"))
    names[2].write_bytes(
        gguf(
            [pair("general.alignment", U32, 64), *_split(2, 3, 2)],
            [entry("b", [1], 0, 0)],
            b"bbbb",
            alignment=64,
        )
    )
    with open_gguf(names[0]) as file:
        assert file.shards == tuple(map(str, names)) and file.path == str(names[0])
        assert list(file.metadata) == [
            "general.architecture",
            "split.no",
            "split.count",
            "split.tensors.count",
        ]
        assert [bytes(file.read_rows(tensor, 0, 1)) for tensor in file.tensors] == [
            b"aaaa",
            b"bbbb",
        ]
        assert file.location("b")[0] == str(names[2])
        for tensor in file.tensors:
            file.release(tensor)


def test_reference_split_equals_its_whole():
    paths = (
        shared("golden/tools/split/tiny-00001-of-00003.gguf"),
        shared("golden/tools/gguf/tiny-llama-f16.gguf"),
    )
    with open_gguf(paths[0]) as split, open_gguf(paths[1]) as whole:
        assert len(split.shards) == 3 and split.tensors == whole.tensors
        for tensor in whole.tensors:
            assert (
                split.read_rows(tensor, 0, tensor.n_rows)
                == whole.read_rows(tensor, 0, tensor.n_rows)
            ).all()
        assert {
            key: value for key, value in split.metadata.items() if not key.startswith("split.")
        } == whole.metadata


def test_reference_interleaved_file():
    with open_gguf(shared("golden/tools/gguf/tiny-llama-untied.Q8_0_R8.repacked.gguf")) as file:
        assert "Q8_0_R8" in {tensor.type.name for tensor in file.tensors}


def test_against_the_gguf_package():
    """Every GGUF file of the reference data reads the same, value by value and tensor by tensor."""
    gguf_package = pytest.importorskip("gguf")
    paths = [
        path
        for path in sorted(shared("golden").rglob("*.gguf"))
        if "-of-" not in path.name and "_R8" not in path.name
    ]
    assert paths
    for path in paths:
        reader = gguf_package.GGUFReader(path)
        with open_gguf(path) as file:
            fields = {
                key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")
            }
            assert list(fields) == list(file.metadata)
            for key, field in fields.items():
                value = file.metadata[key]
                assert [int(kind) for kind in field.types] == [
                    kind for kind in (value.type, value.element) if kind is not None
                ]
                assert field.contents() == value.data
            for tensor, ours in zip(reader.tensors, file.tensors, strict=True):
                theirs = (
                    tensor.name,
                    tuple(reversed(tensor.shape.tolist())),
                    int(tensor.tensor_type),
                    tensor.n_bytes,
                    tensor.data_offset,
                )
                assert theirs == (
                    ours.name,
                    ours.shape,
                    ours.type.id,
                    ours.n_bytes,
                    file.location(ours.name)[1],
                )
                digest = hashlib.sha256(tensor.data.tobytes()).digest()
                assert digest == hashlib.sha256(file.read_bytes(ours, 0, ours.n_bytes)).digest()

"""Writing GGUF files: bytes laid out by hand, and refusals of files that would not be valid."""

from __future__ import annotations

import os

import numpy as np
import pytest
from iqforge.errors import IqforgeError, OutputError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.sharded_writer import ShardedWriter
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import Value, ValueType, array, boolean, f32, i32, string, u16, u32

from .ggufbuild import small
from .two_tensors import METADATA, TENSORS, rows, write


def test_bytes_are_those_of_the_hand_made_file(tmp_path):
    write(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == small()
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_pieces_and_padding(tmp_path):
    """Tensors of unaligned sizes can be written in odd pieces of other dtypes."""
    tensors = [TensorInfo("a", (5,), ggml_type("I8")), TensorInfo("b", (3, 32), ggml_type("Q8_0"))]
    data = np.arange(3 * 34, dtype=np.uint8).reshape(3, 34)
    with GGUFWriter(tmp_path / "m.gguf", {}, tensors) as writer:
        writer.write(tensors[0], np.arange(5, dtype=np.int8)[:2])
        writer.write(tensors[0], np.empty(0, np.int8))
        writer.write(tensors[0], np.arange(5, dtype=np.int8)[2:])
        writer.write(tensors[1], data[:1])
        writer.write(tensors[1], np.asfortranarray(data[1:]))
        assert writer.n_bytes % 32 == 0
    with open_gguf(tmp_path / "m.gguf") as file:
        assert bytes(file.read_rows(file.tensor("a"), 0, 1)) == bytes(range(5))
        assert (file.read_rows(file.tensor("b"), 0, 3) == data).all()
        assert os.path.getsize(file.path) == writer.n_bytes


def test_metadata_round_trip(tmp_path):
    nested = Value(
        ValueType.ARRAY,
        [array(ValueType.UINT8, [1]), array(ValueType.STRING, ["x"])],
        ValueType.ARRAY,
    )
    metadata = {
        "z": u16(1),
        "a": i32(-1),
        "f": f32(0.5),
        "b": boolean(True),
        "s": string("a\udcff\nb"),
        "nested": nested,
        "list": array(ValueType.STRING, ["", "é", "\udcff"]),
        "floats": array(ValueType.FLOAT64, [0.1]),
        "none": array(ValueType.BOOL, []),
        "i64": Value(ValueType.INT64, -(2**63)),
    }
    write(tmp_path / "m.gguf", metadata, [])
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.metadata == metadata and list(file.metadata) == list(metadata)


@pytest.mark.parametrize("alignment", [8, 256])
def test_alignment(tmp_path, alignment):
    for name, stated, given in (
        ("given", {}, alignment),
        ("stated", {"general.alignment": u32(alignment)}, None),
    ):
        with GGUFWriter(tmp_path / name, stated, TENSORS, given) as writer:
            for number, tensor in enumerate(TENSORS):
                writer.write(tensor, rows(number))
        with open_gguf(tmp_path / name) as file:
            assert file.alignment == alignment and file.metadata["general.alignment"] == u32(
                alignment
            )
            assert (file.read_rows(TENSORS[1], 0, 2).view(np.float32) == 1).all()


@pytest.mark.parametrize(
    "metadata, tensors, words",
    [
        ({"k": Value(ValueType.UINT8, 256)}, [], "'k'"),
        ({"k": Value(ValueType.UINT32, "x")}, [], "'k'"),
        ({"k": f32(1e39)}, [], "'k'"),
        ({"k": string("\ud800")}, [], "'k'"),
        ({"a\nb": u32(1)}, [], "printable"),
        ({"": u32(1)}, [], "key 1"),
        ({"general.alignment": u32(3)}, [], "general.alignment"),
        ({}, [TENSORS[0], TENSORS[0]], "twice"),
        ({}, [TensorInfo("n" * 64, (8,), ggml_type("F32"))], "64 bytes"),
        ({}, [TensorInfo("../x", (8,), ggml_type("F32"))], "path"),
        ({}, [TensorInfo("t", (8,), ggml_type("Q8_0"))], "block length"),
        ({}, [TensorInfo("t", (1,) * 5, ggml_type("F32"))], "5 dimensions"),
        ({}, [TensorInfo("t", (2, 256), ggml_type("IQ4_K_R4"))], "row group"),
    ],
)
def test_a_file_that_would_not_open_is_not_begun(tmp_path, metadata, tensors, words):
    with pytest.raises(OutputError, match=words):
        GGUFWriter(tmp_path / "m.gguf", metadata, tensors)
    assert os.listdir(tmp_path) == []


def test_wrong_order_and_wrong_sizes(tmp_path):
    path = tmp_path / "m.gguf"

    def attempt(*writes) -> None:
        with GGUFWriter(path, METADATA, TENSORS) as writer:
            for tensor, data in writes:
                writer.write(tensor, data)

    for writes, words in (
        ([(TENSORS[1], rows(1))], "out of turn.*'t0'"),
        ([(TENSORS[0], np.zeros(17, np.float32))], "68 bytes.*64"),
        ([(TENSORS[0], rows(0))], "0 of 64 bytes"),
        ([(TENSORS[0], rows(0)), (TENSORS[1], rows(1)[:1])], "32 of 64 bytes"),
        ([(TENSORS[0].with_type(ggml_type("F16")), rows(0))], "out of turn"),
        ([(TENSORS[0], rows(0)), (TENSORS[1], rows(1)), (TENSORS[1], rows(1))], "written already"),
    ):
        with pytest.raises(IqforgeError, match=words):
            attempt(*writes)
        assert os.listdir(tmp_path) == []
    writer = GGUFWriter(path, METADATA, TENSORS)
    writer.abort()
    with pytest.raises(IqforgeError, match="finished or aborted"):
        writer.write(TENSORS[0], rows(0))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file(tmp_path, error):
    (tmp_path / "m.gguf").write_bytes(b"old")
    with pytest.raises(error), GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS) as writer:
        writer.write(TENSORS[0], rows(0))
        raise error
    assert os.listdir(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == b"old"


def test_a_forgotten_writer_cleans_up(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS)
    del writer
    assert os.listdir(tmp_path) == []


def test_shards(tmp_path):
    shards = [[], [TENSORS[0]], [TENSORS[1]]]
    with ShardedWriter(tmp_path / "m", METADATA, TENSORS, shards) as writer:
        for number, tensor in enumerate(TENSORS):
            writer.write(tensor, rows(number))
            assert all(name.endswith(".part") for name in os.listdir(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [path.name for path in writer.paths]
    with open_gguf(writer.paths[0]) as file:
        assert file.tensors == tuple(TENSORS) and len(file.shards) == 3
        assert list(file.metadata) == [
            "general.architecture",
            "split.no",
            "split.count",
            "split.tensors.count",
        ]
        assert (file.read_rows(TENSORS[1], 0, 2).view(np.float32) == 1).all()


def test_shards_out_of_turn(tmp_path):
    for numbers, words in (([1], "0 of 64 bytes"), ([0], "0 of 64 bytes"), ([], "0 of 64 bytes")):
        with (
            pytest.raises(IqforgeError, match=words),
            ShardedWriter(
                tmp_path / "m", METADATA, TENSORS, [[TENSORS[0]], [TENSORS[1]]]
            ) as writer,
        ):
            for number in numbers:
                writer.write(TENSORS[number], rows(number))
        assert os.listdir(tmp_path) == []
    with pytest.raises(IqforgeError, match="order"):
        ShardedWriter(tmp_path / "m", METADATA, TENSORS, [[TENSORS[1]], [TENSORS[0]]])

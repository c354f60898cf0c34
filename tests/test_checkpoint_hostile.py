"""Hostile checkpoints: safetensors headers, shard indices and configs that lie. Each ends in a
named error, fast and in little memory.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.checkpoint.safetensors import read_header
from iqforge.errors import (
    CheckpointError,
    ConfigError,
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    TruncatedFileError,
)

from .hostile import quickly

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(dtype: str = "F32", shape=(2,), begin=0, end=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def packed(header: dict | str | bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HOSTILE = {
    "empty file": (b"", TruncatedFileError, "too few"),
    "seven bytes": (bytes(7), TruncatedFileError, "too few"),
    "length 0": (packed("", length=0), MalformedFileError, "too short"),
    "length beyond the file": (packed({"a": ONE}, length=10_000), TruncatedFileError, "10000"),
    "length 2^63": (packed({"a": ONE}, length=2**63), MalformedFileError, str(2**63)),
    "length 2^64-1": (packed({"a": ONE}, length=2**64 - 1), MalformedFileError, str(2**64 - 1)),
    "length over the limit": (packed({"a": ONE}, length=100_000_001), MalformedFileError, "limit"),
    "not an object": (packed("[1, 2]"), MalformedFileError, "starts with"),
    "leading space": (packed(" " + json.dumps({"a": ONE})), MalformedFileError, "starts with"),
    "not JSON": (packed("{nonsense"), MalformedFileError, "not JSON"),
    "text after the object": (packed(json.dumps({"a": ONE}) + "x"), MalformedFileError, "not JSON"),
    "not UTF-8": (packed(b'{"\xff": 1}'), MalformedFileError, "UTF-8"),
    "endless integer": (packed('{"a": ' + "9" * 5000 + "}"), MalformedFileError, "not JSON"),
    "nested deeply": (packed('{"a":' * 100_000), MalformedFileError, "nested"),
    "arrays nested deeply": (packed('{"a":' + "[" * 500_000), MalformedFileError, "nested"),
    "duplicate name": (
        packed(f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(ONE)}}}'),
        MalformedFileError,
        "twice",
    ),
    "duplicate key inside": (
        packed('{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        MalformedFileError,
        "twice",
    ),
    "entry is no object": (packed({"a": 3}), MalformedFileError, "not a JSON object"),
    "missing dtype": (
        packed({"a": {"shape": [2], "data_offsets": [0, 8]}}),
        MalformedFileError,
        "'dtype'",
    ),
    "missing shape": (
        packed({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
        MalformedFileError,
        "'shape'",
    ),
    "missing offsets": (
        packed({"a": {"dtype": "F32", "shape": [2]}}),
        MalformedFileError,
        "'data_offsets'",
    ),
    "unknown dtype": (packed({"a": entry("F31")}), MalformedFileError, "F31"),
    "dtype is a list": (packed({"a": entry(["F32"])}), MalformedFileError, "dtype"),
    "reversed offsets": (packed({"a": entry(begin=8, end=0)}), MalformedFileError, "reversed"),
    "negative offset": (packed({"a": entry(begin=-8, end=0)}), MalformedFileError, "data_offsets"),
    "three offsets": (
        packed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}),
        MalformedFileError,
        "data_offsets",
    ),
    "offset 2^64": (packed({"a": entry(end=2**64)}), MalformedFileError, "data_offsets"),
    "past the end": (packed({"a": entry(shape=(4,), end=16)}), TruncatedFileError, "16"),
    "overlap": (
        packed({"a": entry(shape=(2,)), "b": entry(shape=(1,), begin=4, end=8)}),
        MalformedFileError,
        "overlaps",
    ),
    "same bytes twice": (packed({"a": ONE, "b": ONE}), MalformedFileError, "overlaps"),
    "hole at the start": (
        packed({"a": entry(shape=(1,), begin=4, end=8)}),
        MalformedFileError,
        "hole",
    ),
    "hole in the middle": (
        packed({"a": entry(shape=(1,), end=4), "b": entry(shape=(1,), begin=8, end=12)}, bytes(12)),
        MalformedFileError,
        "hole",
    ),
    "bytes after the last": (packed({"a": ONE}, bytes(9)), MalformedFileError, "1 bytes follow"),
    "shape too large for its bytes": (
        packed({"a": entry(shape=(3,))}),
        MalformedFileError,
        "12 bytes",
    ),
    "shape product wraps": (
        packed({"a": entry(shape=(2**32, 2**32), end=0)}, b""),
        MalformedFileError,
        str(2**66),
    ),
    "shape product 2^63 x 0 bytes": (
        packed({"a": entry(shape=(2**62, 2, 2), end=0)}, b""),
        MalformedFileError,
        "bytes",
    ),
    "negative dimension": (packed({"a": entry(shape=(-2,))}), MalformedFileError, "shape"),
    "boolean dimension": (packed({"a": entry(shape=(True, 2))}), MalformedFileError, "shape"),
    "float dimension": (packed({"a": entry(shape=(2.0,))}), MalformedFileError, "shape"),
    "too many dimensions": (
        packed({"a": entry(shape=[1] * 100_000)}),
        MalformedFileError,
        "100000 dimensions",
    ),
    "F4 misaligned": (
        packed({"a": entry("F4", (3,), 0, 2)}, bytes(2)),
        MalformedFileError,
        "whole bytes",
    ),
    "F6 misaligned": (
        packed({"a": entry("F6_E2M3", (3,), 0, 2)}, bytes(2)),
        MalformedFileError,
        "whole bytes",
    ),
    "F8_E8M0 of the wrong size": (
        packed({"a": entry("F8_E8M0", (3,), 0, 2)}, bytes(2)),
        MalformedFileError,
        "3 bytes",
    ),
    "metadata with a number": (
        packed({"__metadata__": {"format": 1}, "a": ONE}),
        MalformedFileError,
        "__metadata__",
    ),
    "metadata is a list": (
        packed({"__metadata__": [], "a": ONE}),
        MalformedFileError,
        "__metadata__",
    ),
}

VALID = {
    "trailing spaces": (packed(json.dumps({"a": ONE}) + "   "), {"a": (2,)}),
    "scalar": (packed({"a": entry(shape=(), end=4)}, bytes(4)), {"a": ()}),
    "empty tensor": (packed({"a": entry(shape=(0,), end=0)}, b""), {"a": (0,)}),
    "empty among others": (
        packed({"e": entry(shape=(3, 0), end=0), "a": ONE, "f": entry(shape=(0,), begin=8, end=8)}),
        {"e": (3, 0), "a": (2,), "f": (0,)},
    ),
    "any order": (
        packed({"b": entry(shape=(1,), begin=4, end=8), "a": entry(shape=(1,), end=4)}),
        {"b": (1,), "a": (1,)},
    ),
    "metadata": (packed({"__metadata__": {"format": "pt"}, "a": ONE}), {"a": (2,)}),
    "no tensors": (packed({}, b""), {}),
    "F4 in whole bytes": (packed({"a": entry("F4", (4,), 0, 2)}, bytes(2)), {"a": (4,)}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(tmp_path: Path, case: str):
    content, kind, words = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    def attempt() -> pytest.ExceptionInfo:
        with pytest.raises(kind) as raised:
            read_header(path)
        return raised

    # The larger ones depend on the machine.
    raised = quickly(attempt, 0.1 if len(content) < 100_000 else 1)
    assert words in str(raised.value) and str(path) in str(raised.value)
    tracemalloc.start()
    with pytest.raises(kind):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize("case", VALID)
def test_valid_oddity(tmp_path: Path, case: str):
    content, shapes = VALID[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert {
        name: tensor.shape for name, tensor in read_header(tmp_path / "model.safetensors").items()
    } == shapes


def test_sparse_file_with_a_huge_claimed_header_is_not_read(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(10 * 2**40)
    tracemalloc.start()
    with pytest.raises(MalformedFileError, match="starts with"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def checkpoint(
    folder: Path, files: dict[str, dict], index: dict | str | None = None, config: str = "{}"
) -> Path:
    (folder / "config.json").write_text(config)
    for name, header in files.items():
        size = max((item["data_offsets"][1] for item in header.values()), default=0)
        (folder / name).write_bytes(packed(header, np.arange(size, dtype=np.uint8).tobytes()))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(
            index if isinstance(index, str) else json.dumps(index)
        )
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BOTH = {"weight_map": {"a": FIRST, "b": SECOND}}


@pytest.mark.parametrize(
    "index, kind, words",
    [
        (
            {"weight_map": {"a": FIRST, "b": "model-00009-of-00009.safetensors"}},
            NotFoundError,
            "model-00009",
        ),
        ({"weight_map": {"a": FIRST, "b": "../../etc/x"}}, CheckpointError, "../../etc/x"),
        ({"weight_map": {"a": FIRST, "b": "/etc/passwd"}}, CheckpointError, "/etc/passwd"),
        ({"weight_map": {"a": FIRST, "b": "..\\x"}}, CheckpointError, "plain name"),
        ({"weight_map": {"a": FIRST, "b": ".."}}, CheckpointError, "plain name"),
        ({"weight_map": {"a": FIRST, "b": ""}}, CheckpointError, "plain name"),
        ({"weight_map": {"a": FIRST, "b": "x\x00y"}}, CheckpointError, "plain name"),
        ({"weight_map": {"a": FIRST, "b": 3}}, CheckpointError, "weight_map"),
        ({"weight_map": []}, CheckpointError, "weight_map"),
        ({}, CheckpointError, "weight_map"),
        (
            f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}", "b": "{SECOND}"}}}}',
            ConfigError,
            "twice",
        ),
        ({"weight_map": {"a": FIRST, "b": FIRST}}, CheckpointError, "does not have it"),
        ({"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}, CheckpointError, "'c'"),
        ({"weight_map": {"b": FIRST, "a": SECOND}}, CheckpointError, "it is in"),
        ("[]", ConfigError, "not an object"),
        ("{", ConfigError, "not JSON"),
    ],
)
def test_hostile_index(tmp_path: Path, index, kind, words):
    checkpoint(tmp_path, {FIRST: {"a": ONE}, SECOND: {"b": ONE}}, index)
    with pytest.raises(kind) as raised:
        open_checkpoint(tmp_path).tensors
    assert words in str(raised.value)


def test_tensor_in_two_shards(tmp_path: Path):
    checkpoint(
        tmp_path, {FIRST: {"a": ONE}, SECOND: {"b": entry(), "a": entry(begin=8, end=16)}}, BOTH
    )
    with pytest.raises(CheckpointError, match="is stored in"):
        open_checkpoint(tmp_path).tensors


def test_tensor_that_the_index_does_not_name(tmp_path: Path):
    checkpoint(
        tmp_path, {FIRST: {"a": ONE}, SECOND: {"b": entry(), "c": entry(begin=8, end=16)}}, BOTH
    )
    with pytest.raises(CheckpointError, match="does not name it"):
        open_checkpoint(tmp_path).tensors


def test_shards_without_an_index(tmp_path: Path):
    checkpoint(tmp_path, {FIRST: {"a": ONE}, SECOND: {"b": ONE}})
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    (tmp_path / FIRST).unlink()
    with pytest.raises(NotFoundError, match=FIRST):
        open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[]",
        "{",
        '{"architectures": 3}',
        '{"architectures": []}',
        pytest.param("[" * 100_000, id="deep"),
        '{"architectures": "X"}',
        "{}",
    ],
)
def test_hostile_config(tmp_path: Path, config: str):
    checkpoint(tmp_path, {"model.safetensors": {"a": ONE}}, config=config)
    with pytest.raises(IqforgeError, match="config.json"):
        open_checkpoint(tmp_path).architecture


def test_missing_folder_config_and_weights(tmp_path: Path):
    with pytest.raises(NotFoundError, match="not a folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(NotFoundError, match="config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    with pytest.raises(NotFoundError, match="consolidated.00.pth"):
        open_checkpoint(tmp_path).tensors


def test_rows_are_read_from_the_right_bytes(tmp_path: Path):
    checkpoint(tmp_path, {"model.safetensors": {"a": ONE, "b": entry("U8", (2, 3), 8, 14)}})
    with open_checkpoint(tmp_path) as opened:
        tensor = opened.tensors["b"]
        assert opened.data(tensor).tolist() == list(range(8, 14))
        opened.release(tensor)
        assert opened.data(tensor).tolist() == list(range(8, 14))
        with pytest.raises(IqforgeError, match="U8"):
            opened.type_of(tensor)

"""Split models whose shards do not belong together. Each ends in a SplitError that names the shard
and the number.
"""

from __future__ import annotations

import pytest
from iqforge.errors import SplitError
from iqforge.formats.gguf.reader import open_gguf

from .ggufbuild import BOOL, F32, I32, STRING, U16, U32, entry, gguf, pair
from .hostile import refused


def _split(no: int, count: int, n_tensors: int, kind: int = U16) -> list[bytes]:
    return [
        pair("split.no", kind, no),
        pair("split.count", kind, count),
        pair("split.tensors.count", I32, n_tensors),
    ]


def _shard(pairs: list[bytes], name: str) -> bytes:
    return gguf(pairs, [entry(name, [8], 0, 0)], bytes(32))


@pytest.fixture
def pair_of_shards(tmp_path):
    """Write a valid split model of two shards. Tests then overwrite one of them."""
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(
        _shard([pair("general.architecture", STRING, "llama"), *_split(0, 2, 2)], "a")
    )
    second.write_bytes(_shard(_split(1, 2, 2), "b"))
    with open_gguf(first) as file:
        assert [tensor.name for tensor in file.tensors] == ["a", "b"]
    return first, second


def test_other_shard_opened(pair_of_shards):
    first, second = pair_of_shards
    refused(second, SplitError, "shard 2 of 2", str(first))


def test_shard_missing(pair_of_shards):
    first, second = pair_of_shards
    second.unlink()
    refused(first, SplitError, "missing", second.name)


def test_many_shards_missing(tmp_path):
    path = tmp_path / "m-00001-of-65535.gguf"
    path.write_bytes(_shard(_split(0, 65_535, 2), "a"))
    refused(path, SplitError, "missing", "00002-of-65535")


@pytest.mark.parametrize(
    "pairs, words",
    [
        (_split(0, 2, 2), ["split.no", "0", "1"]),
        (_split(2, 2, 2), ["split.no"]),
        (_split(1, 3, 2), ["split.count"]),
        (_split(1, 0, 2), ["split.count"]),
        (_split(1, 2, 3), ["split.tensors.count"]),
        ([], ["split.no", "missing"]),
        (
            [pair("general.architecture", STRING, "qwen3moe"), *_split(1, 2, 2)],
            ["qwen3moe", "llama"],
        ),
    ],
)
def test_second_shard_of_something_else(pair_of_shards, pairs, words):
    first, second = pair_of_shards
    second.write_bytes(_shard(pairs, "b"))
    with pytest.raises(SplitError) as caught:
        open_gguf(first)
    assert all(word in str(caught.value) for word in [*words, second.name])


def test_tensor_in_two_shards(pair_of_shards):
    first, second = pair_of_shards
    second.write_bytes(_shard(_split(1, 2, 2), "a"))
    with pytest.raises(SplitError, match="tensor 'a'.*also in"):
        open_gguf(first)


def test_tensors_do_not_add_up(pair_of_shards):
    first, second = pair_of_shards
    first.write_bytes(_shard(_split(0, 2, 3), "a"))
    second.write_bytes(_shard(_split(1, 2, 3), "b"))
    refused(first, SplitError, "split.tensors.count is 3", "2 tensors")


@pytest.mark.parametrize(
    "kind, count", [(U32, 65_536), (I32, -1), (STRING, "2"), (BOOL, 1), (F32, 2.0)]
)
def test_impossible_split_count(tmp_path, kind, count):
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(
        _shard(
            [
                pair("split.no", U16, 0),
                pair("split.count", kind, count),
                pair("split.tensors.count", I32, 2),
            ],
            "a",
        )
    )
    refused(path, SplitError, "split.count")


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00002.gguf", "m-1-of-2.gguf"]
)
def test_first_shard_with_another_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(_shard(_split(0, 2, 2), "a"))
    refused(path, SplitError, "-00001-of-00002.gguf")


@pytest.mark.parametrize("count", [0, 1])
def test_whole_file_with_split_keys(tmp_path, count):
    """Merging leaves a count of 0; a model that was split into one shard has a count of 1."""
    path = tmp_path / "m.gguf"
    path.write_bytes(_shard(_split(0, count, 1), "a"))
    with open_gguf(path) as file:
        assert file.shards == (str(path),)

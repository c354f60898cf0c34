"""Splitting and merging: the reference's cuts, bytes and refusals, and files that must not be
overwritten.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys

import iqforge.api
import pytest
from iqforge.errors import IqforgeError, OutputError, SplitError, UsageError
from iqforge.formats.commands import gguf_split as split_command
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.tools.split import merge_model, parse_size, split_model

from .ggufbuild import STRING, U32, entry, gguf, pair, small
from .shared import shared


@pytest.fixture
def model(tmp_path):
    """Write a file of 7 tensors of 64 bytes."""
    (tmp_path / "in.gguf").write_bytes(
        small(7, [pair("tokenizer.chat_template", STRING, "x" * 100)])
    )
    return tmp_path / "in.gguf"


def command(*words) -> int:
    parser = argparse.ArgumentParser()
    split_command.configure(parser)
    return split_command.run(parser.parse_args(list(map(str, words))), iqforge.api)


def sizes(paths) -> list[int]:
    counts = []
    for path in paths:
        content = path.read_bytes()
        counts.append(int.from_bytes(content[8:16], "little"))
    return counts


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [7]),
        ({"max_tensors": 3}, [3, 3, 1]),
        ({"max_tensors": 7}, [7]),
        ({"max_tensors": 1}, [1] * 7),
        ({"max_tensors": 4, "first_shard_metadata_only": True}, [0, 4, 3]),
        ({"max_size": 128}, [2, 2, 2, 1]),
        ({"max_size": 191}, [2, 2, 2, 1]),
        ({"max_size": 192}, [3, 3, 1]),
        ({"max_size": "1M"}, [7]),
        ({"max_size": 448, "first_shard_metadata_only": True}, [0, 7]),
    ],
)
def test_cuts(model, tmp_path, options, expected):
    planned = split_model(model, tmp_path / "out", dry_run=True, **options)
    assert os.listdir(tmp_path) == ["in.gguf"]
    paths = split_model(model, tmp_path / "out", **options)
    assert paths == planned and sizes(paths) == expected
    assert [path.name for path in paths] == [
        f"out-{i + 1:05d}-of-{len(expected):05d}.gguf" for i in range(len(expected))
    ]
    with open_gguf(model) as whole, open_gguf(paths[0]) as split:
        assert split.tensors == whole.tensors
    merged = merge_model(paths[0], tmp_path / "merged.gguf")
    check_same_but_split_keys(model, merged)


def check_same_but_split_keys(original, merged) -> None:
    with open_gguf(original) as whole, open_gguf(merged) as file:
        assert file.tensors == whole.tensors and len(file.shards) == 1
        kept = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
        assert kept == whole.metadata and list(kept) == list(whole.metadata)
        assert [
            file.metadata[key].data for key in ("split.no", "split.count", "split.tensors.count")
        ] == [0, 0, len(whole.tensors)]
        for tensor in whole.tensors:
            assert bytes(file.read_bytes(tensor, 0, tensor.n_bytes)) == bytes(
                whole.read_bytes(tensor, 0, tensor.n_bytes)
            )


def test_tensor_larger_than_the_limit(tmp_path):
    """It gets its own shard, except as the first tensor, where the reference refuses it."""
    (tmp_path / "in.gguf").write_bytes(
        gguf(
            [],
            [entry("a", [8], 0, 0), entry("b", [32], 0, 32), entry("c", [8], 0, 160)],
            bytes(192),
        )
    )
    assert sizes(split_model(tmp_path / "in.gguf", tmp_path / "out", max_size=64)) == [1, 1, 1]
    (tmp_path / "in.gguf").write_bytes(
        gguf([], [entry("b", [32], 0, 0), entry("c", [8], 0, 128)], bytes(160))
    )
    with pytest.raises(OutputError, match="0 tensors.*128 bytes.*64"):
        split_model(tmp_path / "in.gguf", tmp_path / "new", max_size=64)
    # A first shard with metadata only does not make the next one larger.
    with pytest.raises(OutputError, match="0 tensors"):
        split_model(
            tmp_path / "in.gguf", tmp_path / "new", max_size=64, first_shard_metadata_only=True
        )
    (tmp_path / "in.gguf").write_bytes(gguf([pair("k", U32, 1)]))
    with pytest.raises(OutputError, match="0 tensors"):
        split_model(tmp_path / "in.gguf", tmp_path / "new")


@pytest.mark.parametrize(
    "text, n_bytes", [("1M", 10**6), ("300M", 3 * 10**8), ("2G", 2 * 10**9), (77, 77)]
)
def test_sizes(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["1K", "1T", "12", "", "M", "1.5G", "-1G", "0M", 0, -1, "1GG", "1m", "9" * 40 + "G"]
)
def test_impossible_sizes(text):
    with pytest.raises(UsageError, match="shard size"):
        parse_size(text)


def test_impossible_limits(model, tmp_path):
    for options in ({"max_tensors": 0}, {"max_tensors": -3}, {"max_tensors": 2, "max_size": "1G"}):
        with pytest.raises(UsageError):
            split_model(model, tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_gguf_ending_of_the_prefix_is_dropped(model, tmp_path):
    assert split_model(model, tmp_path / "out.gguf")[0].name == "out-00001-of-00001.gguf"


def test_splitting_a_split_model_again(model, tmp_path):
    first = split_model(model, tmp_path / "a", max_tensors=2)[0]
    again = split_model(first, tmp_path / "b", max_tensors=5)
    assert sizes(again) == [5, 2]
    check_same_but_split_keys(model, merge_model(again[0], tmp_path / "merged.gguf"))
    with pytest.raises(OutputError, match="same file"):
        split_model(first, tmp_path / "a", max_tensors=2)


def test_refusals_of_merge(model, tmp_path):
    paths = split_model(model, tmp_path / "out", max_tensors=3)
    merged = merge_model(paths[0], tmp_path / "merged.gguf")
    before = sorted(os.listdir(tmp_path))
    new = tmp_path / "x"
    for first, out, error, words in (
        (paths[0], merged, OutputError, "already exists"),
        (paths[0], paths[1], OutputError, "already exists"),
        (paths[1], new, SplitError, "out-00001-of-00003"),
        (model, new, SplitError, "split.count"),
        (merged, new, SplitError, "split count"),
    ):
        with pytest.raises(error, match=words):
            merge_model(first, out)
    os.rename(split_model(model, tmp_path / "one")[0], tmp_path / "renamed.gguf")
    with pytest.raises(SplitError, match="must be called"):
        merge_model(tmp_path / "renamed.gguf", tmp_path / "x")
    os.unlink(paths[2])
    with pytest.raises(SplitError, match="shard 3 of 3 is missing"):
        merge_model(paths[0], tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == sorted(
        [name for name in before if name != paths[2].name] + ["renamed.gguf"]
    )


def test_shards_are_removed_after_a_merge_only(model, tmp_path):
    paths = split_model(model, tmp_path / "out", max_tensors=3)
    words = ["--merge", "--delete-splits", paths[0], tmp_path / "merged.gguf"]
    assert command("--dry-run", *words) == 0 and all(path.exists() for path in paths)
    with pytest.raises(UsageError, match="--delete-splits"):
        command("--delete-splits", model, tmp_path / "again")

    def fail(n_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_model(paths[0], tmp_path / "merged.gguf", delete_shards=True, progress=fail)
    assert all(path.exists() for path in paths) and not (tmp_path / "merged.gguf").exists()
    assert command(*words) == 0
    assert sorted(os.listdir(tmp_path)) == ["in.gguf", "merged.gguf"]
    check_same_but_split_keys(model, tmp_path / "merged.gguf")


def test_a_failed_split_leaves_nothing(model, tmp_path):
    def fail(n_bytes: int) -> None:
        if n_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        split_model(model, tmp_path / "out", max_tensors=2, progress=fail)
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_stated_alignment_is_kept(tmp_path):
    (tmp_path / "in.gguf").write_bytes(
        gguf(
            [pair("general.alignment", U32, 64)],
            [entry("a", [1], 0, 0), entry("b", [1], 0, 64)],
            b"aaaa" + bytes(60) + b"bbbb",
            alignment=64,
        )
    )
    paths = split_model(tmp_path / "in.gguf", tmp_path / "out", max_tensors=1)
    check_same_but_split_keys(tmp_path / "in.gguf", merge_model(paths[0], tmp_path / "merged.gguf"))


def test_command(model, tmp_path, capsys):
    assert command("--split-max-tensors", 3, model, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert (
        "n_split: 3\nsplit 00001: n_tensors = 3, total_size = 0M\n" in printed
        and "7 tensors" in printed
    )
    assert f"Writing file {tmp_path}/out-00003-of-00003.gguf ... done" in printed
    assert (
        command(
            "--merge", "--dry-run", tmp_path / "out-00001-of-00003.gguf", tmp_path / "merged.gguf"
        )
        == 0
    )
    assert not (tmp_path / "merged.gguf").exists()
    assert command("--merge", tmp_path / "out-00001-of-00003.gguf", tmp_path / "merged.gguf") == 0
    assert (
        command(
            "--split",
            "--split_max_size",
            "1M",
            "--no_tensor_first_split",
            "--dry_run",
            model,
            tmp_path / "dry",
        )
        == 0
    )
    assert "split 00002: n_tensors = 7" in capsys.readouterr().out and not list(
        tmp_path.glob("dry*")
    )
    with pytest.raises(IqforgeError):
        command("--split-max-size", "1K", model, tmp_path / "dry")
    for words in (
        ["--split", "--merge"],
        ["--split-max-tensors", "3", "--split_max_size", "1M"],
        ["--split-max-tensors", "x"],
    ):
        with pytest.raises(SystemExit):
            command(*words, model, tmp_path / "dry")


def test_equal_to_the_reference(tmp_path):
    source, expected = shared("golden/tools/gguf/tiny-llama-f16.gguf"), shared("golden/tools/split")
    paths = split_model(source, tmp_path / "tiny", max_tensors=8)
    assert [path.name for path in paths] == sorted(path.name for path in expected.iterdir())
    for path in paths:
        assert path.read_bytes() == (expected / path.name).read_bytes()
    for first in (paths[0], expected / paths[0].name):
        merged = merge_model(first, tmp_path / "merged.gguf").read_bytes()
        assert len(merged) == 169376
        assert (
            hashlib.sha256(merged).hexdigest()
            == "3e069d4b54daeb23564ca016d71c4578882ab38ccf980521ae7f8a8fbb762b0c"
        )
        os.unlink(tmp_path / "merged.gguf")


_MEASURED = """
import resource, sys
from iqforge.formats.tools.split import merge_model, split_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = split_model(sys.argv[1], sys.argv[2], max_tensors=1)[0]
merge_model(first, sys.argv[2] + ".gguf")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_resident_memory_is_bounded(tmp_path):
    """A tensor of 96 MiB is copied in pieces (ru_maxrss counts KiB)."""
    n_bytes = 96 << 20
    with open(tmp_path / "in.gguf", "wb") as file:
        file.write(gguf([], [entry("big", [n_bytes], 24, 0), entry("t", [8], 0, n_bytes)]))
        file.truncate(file.tell() + n_bytes + 32)
    words = [sys.executable, "-c", _MEASURED, tmp_path / "in.gguf", tmp_path / "out"]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 56 << 10

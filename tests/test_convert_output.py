"""Outputs of a conversion: shards, quantized types without a file in between, keys set by the user,
and no file on a disk that is too small.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.commandline.unsupported import CONVERTER_UNSUPPORTED
from iqforge.errors import ConfigError, NotFoundError, OutputError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import TensorInfo
from iqforge.formats.tools.sharding import ShardLimits
from iqforge.formats.types import TYPES

from .shared import shared
from .tiny_checkpoint import make_tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("in") / "hf", n_layers=1)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    return iqforge.convert_model(checkpoint, tmp_path_factory.mktemp("out") / "m.gguf")


def check_shards(first, whole) -> list[int]:
    """Check that the shards have the contents of the whole file. Return their numbers of
    tensors.
    """
    with open_gguf(first) as split, open_gguf(whole) as one:
        assert split.tensors == one.tensors
        assert {
            key: value for key, value in split.metadata.items() if not key.startswith("split.")
        } == one.metadata
        for tensor in one.tensors:
            assert bytes(split.read_bytes(tensor, 0, tensor.n_bytes)) == bytes(
                one.read_bytes(tensor, 0, tensor.n_bytes)
            )
        return [int.from_bytes(open(path, "rb").read(16)[8:], "little") for path in split.shards]


def test_shards(checkpoint, whole, tmp_path):
    made = iqforge.convert_model(checkpoint, tmp_path / "a.gguf", split_max_tensors=5)
    assert made.name == "a-00001-of-00003.gguf" and check_shards(made, whole) == [5, 5, 2]
    made = iqforge.convert_model(
        checkpoint, tmp_path / "b.gguf", split_max_size="300K", no_tensor_first_split=True
    )
    counts = check_shards(made, whole)
    assert counts[0] == 0 and sum(counts) == 12 and len(counts) > 3
    # A single file has the same name as without a limit.
    made = iqforge.convert_model(checkpoint, tmp_path / "c.gguf", split_max_size="2G")
    assert made.name == "c.gguf" and made.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "options",
    [
        {"split_max_tensors": 4},
        {"split_max_size": 1000},
        {"split_max_size": 1000, "small_first_shard": True},
        {"split_max_size": 400},
        {"split_max_tensors": 3, "small_first_shard": True},
    ],
)
def test_cuts_are_those_of_the_reference(tmp_path, options):
    """The cuts are those of the writer of the gguf package, which the reference's converter
    uses.
    """
    gguf = pytest.importorskip("gguf")
    sizes = np.random.default_rng(4).integers(1, 150, 20)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", **options)
    for number, size in enumerate(sizes):
        writer.add_tensor(f"t{number}", np.zeros(size, np.float32))
    tensors = [
        TensorInfo(f"t{number}", (int(size),), TYPES["F32"]) for number, size in enumerate(sizes)
    ]
    limits = ShardLimits(
        options.get("split_max_tensors"),
        options.get("split_max_size"),
        options.get("small_first_shard", False),
    )
    assert [[t.name for t in group] for group in limits.groups(tensors)] == [
        list(shard) for shard in writer.tensors
    ]


def test_limits_that_are_none():
    for options in (
        {"max_tensors": 0},
        {"max_tensors": 1, "max_size": "1M"},
        {"max_size": "1T"},
        {"max_size": "0"},
        {"max_size": "-1"},
        {"metadata_first": True},
    ):
        with pytest.raises(UsageError):
            ShardLimits(**options)
    assert [ShardLimits(max_size=text).bytes for text in ("77", 77, "2K", "3M", "1G")] == [
        77,
        77,
        2000,
        3 * 10**6,
        10**9,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("type", ["q4_k_m", "IQ4_K", "q4_k_r4"])
def test_quantized_as_it_is_read(checkpoint, tmp_path, type):
    """The bytes are those of converting to bf16 first, also with shards and an importance
    matrix.
    """
    imatrix = iqforge.collect_imatrix(
        iqforge.convert_model(checkpoint, tmp_path / "m.gguf"),
        "A text\nof words. " * 60,
        tmp_path / "m.dat",
        n_ctx=64,
        chunks=1,
    )
    assert imatrix.entries
    iqforge.quantize_model(
        tmp_path / "m.gguf", tmp_path / "two-steps.gguf", type, tmp_path / "m.dat", provenance=False
    )
    made = iqforge.convert_model(
        checkpoint, tmp_path / "one-{ftype}.gguf", type, imatrix=tmp_path / "m.dat"
    )
    assert (
        made.name == f"one-{type.lower()}.gguf"
        and made.read_bytes() == (tmp_path / "two-steps.gguf").read_bytes()
    )
    first = iqforge.convert_model(
        checkpoint, tmp_path / "s.gguf", type, imatrix=tmp_path / "m.dat", split_max_tensors=4
    )
    assert len(check_shards(first, made)) == 3


def test_blocks_of_the_checkpoint_are_kept(tmp_path):
    """gpt-oss stores its experts in MXFP4, and quantizing the rest does not change them."""
    folder = shared("golden/convert/gpt_oss_mxfp4/hf")
    plain = iqforge.convert_model(folder, tmp_path / "m.gguf", "bf16")
    made = iqforge.convert_model(folder, tmp_path / "q.gguf", "iq4_nl")
    with open_gguf(plain) as before, open_gguf(made) as after:
        types = {tensor.name: tensor.type.name for tensor in after.tensors}
        packed = [tensor for tensor in before.tensors if tensor.type.name == "MXFP4"]
        assert len(packed) == 6 and "IQ4_NL" in types.values() and "BF16" not in types.values()
        for tensor in packed:
            assert types[tensor.name] == "MXFP4"
            assert bytes(after.read_bytes(tensor, 0, tensor.n_bytes)) == bytes(
                before.read_bytes(tensor, 0, tensor.n_bytes)
            )


def test_unknown_types_name_near_ones(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="iq4_k"):
        iqforge.convert_model(checkpoint, tmp_path / "m.gguf", "iq4k")
    assert not os.listdir(tmp_path)


def test_keys_from_a_file(checkpoint, whole, tmp_path):
    overrides = {
        "general.name": "My Model",
        "general.author": "A. N. Other",
        "general.tags": ["a", "b"],
        "general.size_label": None,
        "general.base_models": [
            {"name": "Base", "repo_url": "https://example.org/base"},
            {"name": "Second"},
        ],
        "general.x": 3,
        "general.y": True,
        "general.z": 0.5,
    }
    (tmp_path / "m.json").write_text(json.dumps(overrides))
    with pytest.raises(OutputError, match="same file as the input"):
        iqforge.convert_model(checkpoint, tmp_path / "m.json", metadata=tmp_path / "m.json")
    made = iqforge.convert_model(checkpoint, tmp_path, "bf16", metadata=tmp_path / "m.json")
    assert made.name == "My-Model-BF16.gguf"
    with open_gguf(made) as file, open_gguf(whole) as plain:
        found = {key: value.data for key, value in file.metadata.items()}
        wanted = {
            key: value.data for key, value in plain.metadata.items() if key != "general.size_label"
        }
        assert found == wanted | {
            "general.name": "My Model",
            "general.author": "A. N. Other",
            "general.tags": ["a", "b"],
            "general.base_model.count": 2,
            "general.base_model.0.name": "Base",
            "general.base_model.0.repo_url": "https://example.org/base",
            "general.base_model.1.name": "Second",
            "general.x": 3,
            "general.y": True,
            "general.z": 0.5,
        }
        keys = list(found)
        assert (
            keys.index("general.author") < keys.index("llama.block_count")
            and keys[0] == "general.architecture"
        )
    named = iqforge.convert_model(
        checkpoint, tmp_path, "bf16", metadata=tmp_path / "m.json", name="Stronger"
    )
    assert named.name.startswith("Stronger-")


def test_a_set_list_replaces_the_whole_list(tmp_path):
    folder = make_tiny_llama(tmp_path / "hf", n_layers=1)
    (folder / "README.md").write_text(
        "---\nbase_model:\n- org/first\n- org/second\nlicense: mit\n---\n"
    )
    (tmp_path / "m.json").write_text(
        '{"general.base_models": [{"name": "Only"}], "general.license": null}'
    )
    made = iqforge.convert_model(folder, tmp_path / "m.gguf", metadata=tmp_path / "m.json")
    with open_gguf(made) as file:
        assert {
            key: value.data
            for key, value in file.metadata.items()
            if "base_model" in key or "license" in key
        } == {"general.base_model.count": 1, "general.base_model.0.name": "Only"}


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"llama.block_count": 3}', "start with"),
        ('{"general.architecture": "x"}', "cannot be set"),
        ('{"general.file_type": 1}', "cannot be set"),
        ('{"general.alignment": 64}', "cannot be set"),
        ('{"general.x": {}}', "expected a string"),
        ('{"general.x": [1]}', "expected a string"),
        ('{"general.x": -1}', "expected a string"),
        ('{"general.base_models": "x"}', "list of objects"),
        ('{"general.": "x"}', "start with"),
        ('{"general.datasets": [{"name": 3}]}', "list of objects"),
        ('{"general.x": 1, "general.x": 2}', "twice"),
        ("[]", "not an object"),
    ],
)
def test_keys_that_cannot_be_set(checkpoint, tmp_path, content, words):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        iqforge.convert_model(checkpoint, tmp_path / "m.gguf", metadata=tmp_path / "m.json")
    assert os.listdir(tmp_path) == ["m.json"]


def test_missing_file_of_keys(checkpoint, tmp_path):
    with pytest.raises(NotFoundError):
        iqforge.convert_model(checkpoint, tmp_path / "m.gguf", metadata=tmp_path / "none.json")


def test_a_disk_that_is_too_small(checkpoint, whole, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    needed = whole.stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed - 1))
    for options in ({}, {"split_max_tensors": 5}):
        with pytest.raises(
            OutputError,
            match=rf"needs {needed if not options else '[0-9]+'} bytes, {needed - 1} are free",
        ):
            iqforge.convert_model(checkpoint, tmp_path / "m.gguf", **options)
    assert not os.listdir(tmp_path)
    assert (
        main(["convert", str(checkpoint), "--outfile", str(tmp_path / "m.gguf"), "--dry-run"]) == 0
    )
    assert (
        f"space needed: {needed} bytes, {needed - 1} are free: not enough"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, needed))
    # The announced size is the true one.
    assert iqforge.convert_model(checkpoint, tmp_path / "m.gguf").stat().st_size == needed


def test_a_missing_folder(checkpoint, tmp_path):
    with pytest.raises(OutputError, match="none"):
        iqforge.convert_model(checkpoint, tmp_path / "none" / "m.gguf", split_max_tensors=3)
    assert not os.listdir(tmp_path)


def test_what_was_written(checkpoint, tmp_path, capsys):
    words = ["convert", str(checkpoint), "--outfile"]
    for name, *flags in (["one-00001-of-00003.gguf"], ["m.gguf", "--split-max-tensors", "6"]):
        assert main([*words, str(tmp_path / name), *flags]) == 0
        made = [path for path in tmp_path.iterdir() if path.name[0] == name[0]]
        size = sum(path.stat().st_size for path in made) / 1e6
        others = " and 1 more shard: " if flags else ": "
        said = capsys.readouterr().out
        assert f"{sorted(made)[0]}{others}12 tensors, {size:.2f} MB written" in said, said


def test_flags_of_the_reference(checkpoint, tmp_path, capsys):
    words = ["convert", str(checkpoint), "--outfile", str(tmp_path / "m.gguf")]
    assert main([*words, "--verbose", "--no-lazy", "--use-temp-file", "--verbose"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line.split()[1] for line in notes] == ["--verbose", "--no-lazy", "--use-temp-file"]
    assert main([*words, "--dry-run", "--split-gate-up"]) == 0
    assert "note: --split-gate-up changes nothing here: gate" in capsys.readouterr().err
    for flag in CONVERTER_UNSUPPORTED:
        with pytest.raises(SystemExit):
            main([*words, flag])
        assert f"'{flag}' ({CONVERTER_UNSUPPORTED[flag]}) is not supp" in capsys.readouterr().err


def test_command(checkpoint, whole, tmp_path, capsys):
    words = [
        "convert",
        str(checkpoint),
        "--outfile",
        str(tmp_path / "m.gguf"),
        "--split-max-tensors",
        "6",
        "--no-tensor-first-split",
    ]
    assert main([*words, "--dry-run", "--outtype", "IQ4_K"]) == 0
    out = capsys.readouterr().out
    assert (
        "BF16 -> IQ4_K" in out
        and "m-00003-of-00003.gguf: 6 tensors" in out
        and not os.listdir(tmp_path)
    )
    assert main(words) == 0
    captured = capsys.readouterr()
    # The message comes before the work starts.
    assert "GB are free" in captured.err and "2 more shards" in captured.err
    assert check_shards(tmp_path / "m-00001-of-00003.gguf", whole) == [0, 6, 6]
    assert main(["convert", str(checkpoint), "--outtype", "q9"]) == 1
    with pytest.raises(SystemExit):
        main([*words, "--split-max-size", "1M"])

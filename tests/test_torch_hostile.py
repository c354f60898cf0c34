"""PyTorch checkpoints that lie or try to run code: each ends in a named error, and nothing runs."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from iqforge.api import open_source
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.torch.header import read_torch_header
from iqforge.errors import (
    CheckpointError,
    ConfigError,
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    TruncatedFileError,
    UnsupportedTypeError,
)

from .hostile import quickly
from .tiny_checkpoint import make_tiny_llama
from .torch_files import as_torch

WITNESS = "IQFORGE_TEST_CODE_RAN"


class Attack:
    def __reduce__(self):
        return os.putenv, (WITNESS, "1")


def repacked(path: Path, change=None, compression=zipfile.ZIP_STORED) -> None:
    """Rewrite a zip archive, `change(name, data)` giving other data, or None to leave an entry
    out.
    """
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            if (data := data if change is None else change(name, data)) is not None:
                archive.writestr(name, data)


def with_pickle(path: Path, text: bytes) -> None:
    torch.save({"a": torch.zeros(2)}, path)
    repacked(path, lambda name, data: text if name.endswith("data.pkl") else data)


PICKLES = {
    "runs code": (pickle.dumps({"a": Attack()}, 2), "posix.putenv"),
    "runs code, protocol 4": (pickle.dumps({"a": Attack()}, 4), "posix.putenv"),
    "eval": (b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.", "__builtin__.eval"),
    "getattr through torch": (b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00x\x85R.", "torch.load"),
    "instance by INST": (b"\x80\x02(ios\nsystem\n.", "INST"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "calls a storage": (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage"),
    "attributes of a name": (b"\x80\x02ctorch\nFloatStorage\n}b.", "sets attributes"),
    "no end": (b"\x80\x02}", "broken"),
    "empty": (b"", "broken"),
    "empty stack": (b"\x80\x02.", "broken"),
    "no mark": (b"\x80\x02}u.", "broken"),
    "missing memo": (b"\x80\x02h\x05.", "broken"),
    "a list": (b"\x80\x02].", "holds a list"),
    "a number": (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "holds a int"),
    "nested": (b"\x80\x02}X\x0a\x00\x00\x00state_dict}s.", "another dictionary"),
    "key twice": (b"\x80\x02}(X\x01\x00\x00\x00aNX\x01\x00\x00\x00aNu.", "twice"),
    "key is a number": (b"\x80\x02}K\x01Ns.", "not the name"),
    "key is a deep tuple": (b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.", "tuple as a key"),
    "doubling tuples": (b"\x80\x02})" + b"q\x01h\x01\x86" * 100 + b"Ns.", "tuple as a key"),
    "protocol 1": (b"\x80\x01}.", "protocol 1"),
    "long length": (b"\x80\x02\x8d" + b"\xff" * 8 + b".", "broken"),
    "too many objects": (b"\x80\x02" + b"N" * 4_100_000 + b".", "objects"),
}


def test_a_zip_archive_of_a_newer_format_is_named(tmp_path: Path):
    """The format is not broken, but nobody here can read it."""
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.bin")
    content = bytearray((tmp_path / "x.bin").read_bytes())
    entry = content.index(b"PK\x01\x02")  # of the directory; the version to extract it is at 6
    content[entry + 6] = 99
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UnsupportedTypeError, match=r"x\.bin.*zip file version 9\.9"):
        read_torch_header(tmp_path / "x.bin")


@pytest.mark.parametrize("flag", [1 << 0, 1 << 5, 1 << 6])
@pytest.mark.parametrize("entry, words", [("data.pkl", "archive entry"), ("data/0", "tensor 'a'")])
def test_an_encrypted_entry_is_named(tmp_path: Path, entry: str, words: str, flag: int):
    """Of the pickle the error names the entry, of a storage its tensor."""
    path = tmp_path / "x.bin"
    torch.save({"a": torch.zeros(2)}, path)
    content = bytearray(path.read_bytes())
    name = content.rindex(f"x/{entry}".encode())  # in the directory, where the flags are at 8
    content[name - 46 + 8] |= flag
    path.write_bytes(content)
    with pytest.raises(UnsupportedTypeError, match="compressed or encrypted") as raised:
        read_torch_header(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("case", PICKLES)
def test_hostile_pickle(tmp_path: Path, case: str):
    text, words = PICKLES[case]
    with_pickle(tmp_path / "x.bin", text)

    def attempt() -> pytest.ExceptionInfo:
        with pytest.raises(MalformedFileError) as raised:
            read_torch_header(tmp_path / "x.bin")
        return raised

    raised = quickly(attempt, 0.2 if len(text) < 10_000 else 30)
    assert words in str(raised.value) and "x.bin" in str(raised.value)
    assert WITNESS not in os.environ


class Persistent(pickle.Pickler):
    def persistent_id(self, value):
        return value.identifier if isinstance(value, Stored) else None


class Stored:
    def __init__(self, *identifier):
        self.identifier = identifier


class View:
    def __init__(self, storage, *arguments):
        self.arguments = (storage, *arguments)

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (*self.arguments, False, collections.OrderedDict())


def view(offset=0, shape=(2,), strides=(1,), key="0", numel=2, kind=torch.FloatStorage) -> bytes:
    text = io.BytesIO()
    Persistent(text, 2).dump(
        {"a": View(Stored("storage", kind, key, "cpu", numel), offset, shape, strides)}
    )
    return text.getvalue()


def test_the_view_that_the_next_test_varies_is_valid(tmp_path: Path):
    with_pickle(tmp_path / "x.bin", view())
    assert read_torch_header(tmp_path / "x.bin")["a"].shape == (2,)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"offset": 1}, "leaves"),
        ({"shape": (3,)}, "leaves"),
        ({"shape": (2, 2), "strides": (1, 1)}, "leaves"),
        ({"strides": (2,)}, "leaves"),
        ({"offset": 2**61}, "leaves"),
        ({"shape": (2**40, 2**40), "strides": (0, 1)}, "leaves"),
        ({"offset": -1}, "not sizes"),
        ({"strides": (-1,)}, "not sizes"),
        ({"shape": (2, 2)}, "not sizes"),
        ({"offset": 2**80}, "not sizes"),
        ({"key": "7"}, "not in the archive"),
        ({"key": "../version"}, "not in the archive"),
        ({"numel": 3}, "takes 12 bytes"),
        ({"numel": 2**61}, "takes"),
        ({"numel": -1}, "not a storage"),
        ({"kind": torch.DoubleStorage}, "takes 16 bytes"),
        ({"shape": (1,) * 40, "strides": (1,) * 40}, "40 dimensions"),
        ({"kind": torch.ComplexFloatStorage}, "ComplexFloatStorage"),
    ],
)
def test_hostile_view(tmp_path: Path, changes: dict, words: str):
    with_pickle(tmp_path / "x.bin", view(**changes))
    with pytest.raises(MalformedFileError, match=words):
        read_torch_header(tmp_path / "x.bin")


def test_expanding_to_a_huge_shape_allocates_nothing(tmp_path: Path):
    with_pickle(tmp_path / "x.bin", view(shape=(2**40, 2), strides=(0, 1)))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.bin").rename(tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.tensors["a"]
        assert tensor.n_bytes == 2**43 and checkpoint.read(
            tensor, 2**42, 2**42 + 16
        ).tobytes() == bytes(16)


@pytest.mark.parametrize(
    "damage, kind, words",
    [
        (lambda path: path.write_bytes(b""), TruncatedFileError, "empty"),
        (lambda path: path.write_bytes(b"GGUF"), MalformedFileError, "starts with"),
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), MalformedFileError, "zip"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), MalformedFileError, "zip"),
        (
            lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
            UnsupportedTypeError,
            "before version 1.6",
        ),
        (
            lambda path: path.write_bytes(b"x" * 257 + b"ustar" + bytes(500)),
            UnsupportedTypeError,
            "tar",
        ),
        (
            lambda path: repacked(path, compression=zipfile.ZIP_DEFLATED),
            UnsupportedTypeError,
            "compressed or encrypted",
        ),
        (
            lambda path: repacked(
                path, lambda name, data: None if name.endswith("data.pkl") else data
            ),
            MalformedFileError,
            "0 entries",
        ),
        (
            lambda path: repacked(
                path, lambda name, data: None if name.endswith("data/0") else data
            ),
            MalformedFileError,
            "not in the archive",
        ),
        (
            lambda path: repacked(
                path, lambda name, data: data[:-1] if name.endswith("data/0") else data
            ),
            MalformedFileError,
            "takes 8 bytes",
        ),
        (
            lambda path: repacked(
                path, lambda name, data: b"big" if name.endswith("byteorder") else data
            ),
            UnsupportedTypeError,
            "big-endian",
        ),
        (
            lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path),
            UnsupportedTypeError,
            "TorchScript",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_damaged_archive(tmp_path: Path, damage, kind, words):
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(2)}, path)
    damage(path)
    with pytest.raises(kind) as raised:
        read_torch_header(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_every_flipped_byte_of_a_small_file_is_survived(tmp_path: Path):
    """Some flips change only values or names and pass; the others end in named errors."""
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(2)}, path)
    content = path.read_bytes()
    refused = 0
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            read_torch_header(path)
        except IqforgeError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "change, kind, words",
    [
        (
            lambda index: index["weight_map"].update(a="../pytorch_model.bin"),
            CheckpointError,
            "plain name",
        ),
        (
            lambda index: index["weight_map"].update(a="pytorch_model-00009-of-00009.bin"),
            NotFoundError,
            "missing",
        ),
        (
            lambda index: index["weight_map"].update(a=next(iter(index["weight_map"].values()))),
            CheckpointError,
            "does not have it",
        ),
        (lambda index: index["weight_map"].popitem(), CheckpointError, "does not name it"),
    ],
)
def test_hostile_index(tmp_path: Path, change, kind, words):
    folder = as_torch(make_tiny_llama(tmp_path / "model", n_layers=1), 2)
    index = json.loads((folder / "pytorch_model.bin.index.json").read_text())
    change(index)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(kind, match=words):
        open_checkpoint(folder).tensors


def test_an_index_that_names_a_tensor_twice(tmp_path: Path):
    folder = as_torch(make_tiny_llama(tmp_path / "model", n_layers=1), 2)
    (folder / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "x.bin", "a": "x.bin"}}'
    )
    with pytest.raises(ConfigError, match="twice"):
        open_checkpoint(folder).tensors


def test_missing_shard_without_an_index(tmp_path: Path):
    folder = as_torch(make_tiny_llama(tmp_path / "model", n_layers=1), 3)
    (folder / "pytorch_model.bin.index.json").unlink()
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(NotFoundError, match="pytorch_model-00002-of-00003.bin"):
        open_checkpoint(folder).tensors


def test_wrong_shape_names_the_tensor(tmp_path: Path):
    folder = as_torch(make_tiny_llama(tmp_path / "model", n_layers=1), 1)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors["model.norm.weight"] = torch.zeros(7)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*\[7\].*\[256\]"):
        open_source(folder)

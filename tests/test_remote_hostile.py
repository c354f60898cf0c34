"""Converting from a server that misbehaves, or from a repository that lies: passing trouble is
overcome, lasting trouble is named.
"""

from __future__ import annotations

import os
from pathlib import Path

import iqforge
import pytest
from iqforge.api import open_source
from iqforge.convert.hub import checkpoint as remote
from iqforge.convert.hub import http_ranges, repository
from iqforge.convert.hub.checkpoint import open_remote
from iqforge.convert.hub.repository import Address
from iqforge.errors import (
    CheckpointError,
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    RemoteError,
    TruncatedFileError,
    UnsupportedTypeError,
)

from .hub_server import COMMIT, reply, serve, surroundings  # noqa: F401  (a fixture)
from .tiny_checkpoint import make_tiny_llama

# --- servers that misbehave


def weight_ranges(answer):
    """Apply `answer(hub, handler, name, start, stop, number)` to ranges beyond the headers.
    `number` counts them.
    """
    seen = []

    def misbehave(hub, handler, name, start, stop):
        if start == 0:
            return False
        with hub.lock:
            seen.append(start)
            number = len(seen)
        return answer(hub, handler, name, start, stop, number)

    return misbehave


def piece(hub, name, start, stop) -> bytes:
    return (hub.folder / name).read_bytes()[start:stop]


def content_range(hub, name, start, stop) -> dict[str, str]:
    return {"Content-Range": f"bytes {start}-{stop - 1}/{(hub.folder / name).stat().st_size}"}


def breaks_off(hub, handler, name, start, stop, number):
    """Break off every other answer in the middle."""
    if number % 2 and stop - start > 10:
        data = piece(hub, name, start, stop)
        reply(
            handler,
            206,
            data[: len(data) // 3],
            content_range(hub, name, start, stop),
            length=len(data),
        )
        return True
    return False


def sends_less(hub, handler, name, start, stop, number):
    """Answer with a shorter range than requested."""
    if stop - start > 30_000:
        reply(
            handler,
            206,
            piece(hub, name, start, start + 30_000),
            content_range(hub, name, start, start + 30_000),
        )
        return True
    return False


def is_busy(hub, handler, name, start, stop, number):
    """Refuse each range twice. (Refusing every n-th request of all readers could refuse one reader
    any number of times.)
    """
    tries = hub.__dict__.setdefault("tries", {})
    tries[name, start] = tries.get((name, start), 0) + 1
    if tries[name, start] < 3:
        reply(handler, 429 if number % 2 else 503, b"slow down", {"Retry-After": "0"})
        return True
    return False


def hangs_up(hub, handler, name, start, stop, number):
    if number % 2:
        handler.close_connection = True
        return True
    return False


def signature_expires(hub, handler, name, start, stop, number):
    if number == 4:
        reply(handler, 403, b"Request has expired")
        return True
    return False


@pytest.mark.parametrize("answer", [breaks_off, sends_less, is_busy, hangs_up, signature_expires])
def test_passing_trouble_is_overcome(tmp_path: Path, monkeypatch, answer):
    folder = make_tiny_llama(tmp_path / "model", n_layers=2, shards=2)
    expected = iqforge.convert_model(folder, tmp_path / "expected.gguf").read_bytes()
    monkeypatch.setattr(remote, "BLOCK_BYTES", 100_000)
    monkeypatch.setattr(http_ranges, "ATTEMPTS", 12)
    with serve(monkeypatch, folder, misbehave=weight_ranges(answer)):
        assert (
            iqforge.convert_model("hf://org/model", tmp_path / "made.gguf").read_bytes() == expected
        )


def changes(hub, handler, name, start, stop, number):
    if number == 5:
        hub.versions[name] += 1


def grows(hub, handler, name, start, stop, number):
    if number >= 5:
        with open(hub.folder / name, "ab") as file:
            file.write(b"more")


def ignores_ranges(hub, handler, name, start, stop, number):
    reply(handler, 200, (hub.folder / name).read_bytes())
    return True


def wrong_place(hub, handler, name, start, stop, number):
    reply(
        handler, 206, piece(hub, name, start, stop), content_range(hub, name, start - 8, stop - 8)
    )
    return True


def no_content_range(hub, handler, name, start, stop, number):
    reply(handler, 206, piece(hub, name, start, stop))
    return True


def is_gone(hub, handler, name, start, stop, number):
    reply(handler, 404, b"")
    return True


def always_busy(hub, handler, name, start, stop, number):
    reply(handler, 503, b"")
    return True


def never_sends_all(hub, handler, name, start, stop, number):
    reply(handler, 206, b"", content_range(hub, name, start, stop), length=stop - start)
    return True


@pytest.mark.parametrize(
    "answer, kind, words",
    [
        (changes, RemoteError, "the file has changed while it was read: its ETag was"),
        (grows, RemoteError, "the file has changed while it was read: it had"),
        (ignores_ranges, RemoteError, "ignores ranges"),
        (wrong_place, RemoteError, "were asked for"),
        (no_content_range, RemoteError, "Content-Range ''"),
        (is_gone, NotFoundError, "no such file"),
        (always_busy, RemoteError, "7 attempts: HTTP 503"),
        (never_sends_all, RemoteError, "7 attempts: the connection ended after 0 of"),
    ],
)
def test_lasting_trouble_is_named_and_leaves_no_file(
    tmp_path: Path, monkeypatch, answer, kind, words
):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 100_000)
    (tmp_path / "out").mkdir()
    with (
        serve(monkeypatch, folder, misbehave=weight_ranges(answer)),
        pytest.raises(kind, match=words) as raised,
    ):
        iqforge.convert_model("hf://org/model", tmp_path / "out" / "made.gguf")
    assert f"org/model@{COMMIT[:8]}/model.safetensors" in str(raised.value)
    assert os.listdir(tmp_path / "out") == []


# --- repositories that lie


@pytest.mark.parametrize(
    "siblings, kind, words",
    [
        ([{"rfilename": "../x.json"}], RemoteError, "not a valid file name"),
        ([{"rfilename": "/etc/x.json"}], RemoteError, "not a valid file name"),
        ([{"rfilename": "a\\..\\b.json"}], RemoteError, "not a valid file name"),
        ([{"rfilename": "a\nb.json"}], RemoteError, "not a valid file name"),
        ([{"rfilename": 3}], RemoteError, "not a valid file name"),
        ([{"name": "x"}], RemoteError, "does not describe"),
        (3, RemoteError, "does not describe"),
        ([], NotFoundError, "config.json"),
        ([{"rfilename": "absent.json"}], NotFoundError, "absent.json.*no such file"),
    ],
)
def test_hostile_listing(tmp_path: Path, monkeypatch, siblings, kind, words):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    with serve(monkeypatch, folder, siblings=siblings), pytest.raises(kind, match=words):
        open_remote("org/model")


def shorten(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    "damage, kind, words",
    [
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            NotFoundError,
            "model-00002-of-00002.safetensors.*missing",
        ),
        (shorten, TruncatedFileError, "its data ends"),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b""),
            TruncatedFileError,
            "too few",
        ),
        (
            lambda folder: (folder / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100),
            MalformedFileError,
            "exceeds the limit",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "../x"}}'
            ),
            CheckpointError,
            "plain name",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                '{"architectures": ["LlamaForCausalLN"]}'
            ),
            IqforgeError,
            "LlamaForCausalLM",
        ),
    ],
)
def test_damaged_repository(tmp_path: Path, monkeypatch, damage, kind, words):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1, shards=2)
    damage(folder)
    with serve(monkeypatch, folder), pytest.raises(kind, match=words):
        open_source("hf://org/model")


def test_a_file_that_is_too_long_is_named_with_both_numbers(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    (folder / "config.json").write_text("{   }")
    with serve(monkeypatch, folder):
        opened = repository.Repository(Address.parse("org/model"))
        message = r"^org/model@\w{8}/config\.json: the file has 5 bytes; the limit is 4$"
        with pytest.raises(RemoteError, match=message):
            opened.get("config.json", 4)


def test_pytorch_files_are_not_read_in_ranges(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with (
        serve(monkeypatch, folder),
        pytest.raises(UnsupportedTypeError, match="org/model@01234567.*download"),
    ):
        open_source("hf://org/model")

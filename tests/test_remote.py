"""Converting from a server: the loading code as users run it, against a local server that also
misbehaves.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import iqforge
import numpy as np
import pytest
from huggingface_hub import close_session, constants
from iqforge.api import open_source
from iqforge.convert.hub import checkpoint as remote
from iqforge.convert.hub import http_ranges, repository
from iqforge.convert.hub.checkpoint import open_remote
from iqforge.convert.hub.repository import Address, access_token
from iqforge.errors import (
    CheckpointError,
    IqforgeError,
    MalformedFileError,
    NotFoundError,
    RemoteError,
    TruncatedFileError,
    UnsupportedTypeError,
    UsageError,
)

from .hub_server import COMMIT, Hub, reply
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe

TOKEN = "hf_secret"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path: Path):
    """Use no token and no proxy of the user, and short pauses."""
    for name in [
        *(name for name in os.environ if name.lower().endswith("_proxy")),
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
    ]:
        monkeypatch.delenv(name, raising=False)
    # What huggingface_hub read from the environment when it was imported.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    close_session()  # huggingface_hub keeps its connections, and with them the proxies
    monkeypatch.setattr(http_ranges, "FIRST_PAUSE", 0.002)
    monkeypatch.setattr(http_ranges, "GROWTH", 1.5)


def serve(monkeypatch, folder: Path, **options) -> Hub:
    hub = Hub(folder, **options)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return hub


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "make, options",
    [
        (make_tiny_llama, {"shards": 3}),
        (make_tiny_llama, {"dtype": "f32", "tied": True}),
        (make_tiny_qwen3moe, {"shards": 2}),
    ],
)
@pytest.mark.parametrize("outtype", ["auto", "q8_0"])
def test_same_file_as_from_the_folder(tmp_path: Path, monkeypatch, make, options, outtype):
    folder = make(tmp_path / "model", **options)
    expected = iqforge.convert_model(folder, tmp_path / "expected.gguf", outtype).read_bytes()
    monkeypatch.setattr(remote, "BLOCK_BYTES", 100_000)
    with serve(monkeypatch, folder) as hub:
        made = iqforge.convert_model("hf://org/model", tmp_path / "made.gguf", outtype)
    assert made.read_bytes() == expected
    fetched = sum(stop - start for name, start, stop in hub.ranges)
    # Every weight once, and the first bytes of each shard.
    assert fetched < weights(folder) * 1.01 + 3 * 300_000


def test_only_headers_are_fetched_before_rows_are_requested(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=8, shards=2)
    # Less than any header: the rest is fetched too.
    monkeypatch.setattr(remote, "_HEADER_GUESS", 64)
    with serve(monkeypatch, folder) as hub, open_source("hf://org/model@main") as source:
        headers = sum(stop - start for _, start, stop in hub.ranges)
        assert headers < 20_000 < weights(folder)
        tensor = next(t for t in source.tensors if t.name == "blk.5.ffn_down.weight")
        rows = source.read_rows(tensor, 3, 5)
        with open_source(folder) as local:
            assert np.array_equal(rows, local.read_rows(tensor, 3, 5))
        assert sum(stop - start for _, start, stop in hub.ranges) - headers == tensor.n_bytes
        temporary = source.checkpoint.path
        assert temporary.is_dir() and not list(temporary.glob("*.safetensors"))
    assert not temporary.exists()


def test_reads_of_any_range_are_right_and_the_cache_is_bounded(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    monkeypatch.setattr(remote, "BLOCK_BYTES", 9000)
    monkeypatch.setattr(remote, "CACHE_BYTES", 45_000)
    random = np.random.default_rng(3)
    with serve(monkeypatch, folder), open_remote("org/model") as far, open_source(folder) as near:
        tensor = far.tensors["model.layers.0.mlp.up_proj.weight"]
        whole = near.checkpoint.data(near.checkpoint.tensors[tensor.name])
        for _ in range(25):
            start, stop = sorted(int(n) for n in random.integers(0, tensor.n_bytes + 1, 2))
            if random.random() < 0.5:
                stop = min(stop, start + 15_000)
            assert np.array_equal(far.read(tensor, start, stop), whole[start:stop])
        assert len(far._storage._blocks) <= 5 + remote.CONNECTIONS + remote.READ_AHEAD


def test_command_line_names_the_output_after_the_repository(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    with serve(monkeypatch, folder):
        for number, arguments in enumerate((["--remote", "org/model"], ["org/model", "--remote"])):
            (tmp_path / str(number)).mkdir()
            done = subprocess.run(
                [sys.executable, "-m", "iqforge", "convert", *arguments],
                cwd=tmp_path / str(number),
                text=True,
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr
            assert os.listdir(tmp_path / str(number)) == ["org-model-bf16.gguf"]
        done = subprocess.run(
            [sys.executable, "-m", "iqforge", "convert", "x", "--remote", "org/model"],
            text=True,
            capture_output=True,
        )
        assert done.returncode == 1 and "either" in done.stderr


def test_quantizing_straight_from_a_server(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    iqforge.quantize_model(folder, tmp_path / "expected.gguf", "Q8_0", pure=True)
    with serve(monkeypatch, folder):
        dry = iqforge.quantize_model(
            "hf://org/model", tmp_path / "made.gguf", "Q8_0", pure=True, dry_run=True, estimate=True
        )
        assert dry.estimate.seconds > 0 and not (tmp_path / "made.gguf").exists()
        iqforge.quantize_model(
            "hf://org/model", tmp_path / "made.gguf", "Q8_0", pure=True, validate=True
        )
    assert (tmp_path / "made.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


# --- access


def test_token_goes_to_the_hub_and_not_to_where_it_redirects(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serve(monkeypatch, folder, token=TOKEN) as hub:
        iqforge.convert_model("hf://org/model", tmp_path / "made.gguf")
    assert hub.tokens_at_the_store == {None}


def test_sources_of_the_access_token(tmp_path: Path, monkeypatch):
    assert access_token() is None
    Path(constants.HF_TOKEN_PATH).write_text("from_login\n")
    assert access_token() == "from_login"
    monkeypatch.setenv("HF_TOKEN", "from_environment")
    assert access_token() == "from_environment"
    monkeypatch.setenv("HF_TOKEN", "two words")
    with pytest.raises(UsageError, match="HF_TOKEN"):
        access_token()


@pytest.mark.parametrize(
    "address, token, kind, words",
    [
        (
            "hf://org/model",
            "gated_token",
            RemoteError,
            "gated: accept its terms on http.*org/model.*no access token",
        ),
        ("hf://org/model", TOKEN, NotFoundError, "no such repository.*private.*HF_TOKEN"),
        ("hf://org/other", None, NotFoundError, "no such repository"),
        ("hf://org/model@v9", None, NotFoundError, "no revision 'v9'"),
        ("hf://../model", None, UsageError, "not a repository"),
        ("hf://a/b/c", None, UsageError, "not a repository"),
        ("hf://org/model@", None, UsageError, "not a repository"),
        ("hf://", None, UsageError, "not a repository"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch, address, token, kind, words):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    with serve(monkeypatch, folder, token=token), pytest.raises(kind, match=words):
        open_source(address)


def test_offline_and_endpoints_that_are_none(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "ftp://127.0.0.1")
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        open_remote("org/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match="org/model@main.*3 attempts.*refused.*check the network"):
        open_remote("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE"):
        open_remote("org/model")
    assert str(Address.parse("hf://org/model@refs/pr/1")) == "org/model@refs/pr/1"


@pytest.mark.parametrize("kind", ["closed", "silent", "accepts"])
def test_without_a_network_it_says_so_within_ten_seconds(monkeypatch, kind):
    """The cases are a port that refuses, one whose connections are not accepted, and one that never
    answers.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind != "closed":
            server.listen(16)
        if kind == "accepts":
            threading.Thread(target=accept_and_wait, args=(server,), daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert repository.FIRST_CONTACT_SECONDS + 1 < 10
        monkeypatch.setattr(repository, "FIRST_CONTACT_SECONDS", 1)
        started = time.monotonic()
        with pytest.raises(RemoteError) as raised:
            open_source("hf://org/model")
        seconds = time.monotonic() - started
    why = "Connection refused" if kind == "closed" else "the server does not answer"
    for words in ("org/model@main", address, why, "check the network"):
        assert words in str(raised.value)
    assert seconds < 10


def test_without_a_network_the_command_is_one_line_of_error(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "iqforge", "convert", "--remote", "org/model"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "http://127.0.0.1:9" in done.stderr and "check the network" in done.stderr
    assert os.listdir(tmp_path) == []


def accept_and_wait(server: socket.socket) -> None:
    kept = []
    while True:
        try:
            kept.append(server.accept())
        except OSError:
            return


def test_a_name_that_is_never_resolved_is_given_up_in_time(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(repository, "FIRST_CONTACT_SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: time.sleep(3))
    with pytest.raises(
        RemoteError, match="hub.invalid: the server does not answer within.*check the network"
    ):
        open_remote("org/model")


def test_a_proxy_gets_the_whole_address(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    with serve(monkeypatch, folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("http_proxy", hub.endpoint)
        with open_remote("org/model") as checkpoint:
            assert checkpoint.config.values["model_type"] == "llama"


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

"""Converting from a server: the loading code as users run it, against a local server."""

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
from huggingface_hub import constants
from iqforge.api import open_source
from iqforge.convert.hub import checkpoint as remote
from iqforge.convert.hub import repository
from iqforge.convert.hub.checkpoint import open_remote
from iqforge.convert.hub.repository import Address, access_token
from iqforge.errors import (
    NotFoundError,
    RemoteError,
    UsageError,
)

from .hub_server import serve, surroundings  # noqa: F401  (a fixture)
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe

TOKEN = "hf_secret"


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
        # A refusal comes at once, but a busy machine may be slow to take notice.
        monkeypatch.setattr(repository, "FIRST_CONTACT_SECONDS", 240 if kind == "closed" else 1)
        started = time.monotonic()
        with pytest.raises(RemoteError) as raised:
            open_source("hf://org/model")
        seconds = time.monotonic() - started
    why = "Connection refused" if kind == "closed" else "the server does not answer"
    for words in ("org/model@main", address, why, "check the network"):
        assert words in str(raised.value)
    assert seconds < (200 if kind == "closed" else 10)


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
    given_up = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: given_up.wait(240))
    with pytest.raises(
        RemoteError, match="hub.invalid: the server does not answer within.*check the network"
    ):
        open_remote("org/model")
    given_up.set()


def test_a_proxy_gets_the_whole_address(tmp_path: Path, monkeypatch):
    folder = make_tiny_llama(tmp_path / "model", n_layers=1)
    with serve(monkeypatch, folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("http_proxy", hub.endpoint)
        with open_remote("org/model") as checkpoint:
            assert checkpoint.config.values["model_type"] == "llama"

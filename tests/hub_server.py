"""A local server that speaks the Hub's protocol, and misbehaves if a test wants it to."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants
from iqforge.convert.hub import http_ranges

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serve `folder` as repository `org/model`, and weights through a redirection to a second
    address, as the Hub does.

    `misbehave(hub, handler, file, start, stop)` is called before each range is answered, and
    returns True if it has answered itself. `requests` counts paths, `ranges` lists (file, start,
    stop) that were answered.
    """

    def __init__(
        self,
        folder: Path,
        *,
        token: str | None = None,
        misbehave=None,
        name: str = "org/model",
        siblings=None,
    ):
        self.folder, self.token, self.misbehave, self.name = folder, token, misbehave, name
        self.siblings = siblings
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []
        self.tokens_at_the_store: set[str | None] = set()
        self.versions: Counter[str] = Counter()  # raised by a test to give a file another ETag
        self.lock = threading.Lock()
        self._read: dict[str, tuple] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            def log_message(self, *arguments):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *arguments):  # clients that hang up are part of the tests
                pass

        self._servers = [Server(("127.0.0.1", 0), Handler) for _ in range(2)]
        self.endpoint, self.store = (
            f"http://127.0.0.1:{server.server_port}" for server in self._servers
        )

    def __enter__(self) -> Hub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def answer(self, handler) -> None:
        url = urlsplit(handler.path)
        path = unquote(url.path)
        at_store = handler.server is self._servers[1]
        with self.lock:
            self.requests[path] += 1
            if at_store:
                self.tokens_at_the_store.add(handler.headers.get("Authorization"))
        if at_store:
            self.content(handler, path.removeprefix("/store/"))
        elif (
            self.token is not None
            and handler.headers.get("Authorization") != f"Bearer {self.token}"
        ):
            reply(
                handler,
                401,
                b"",
                {"X-Error-Code": "GatedRepo"} if self.token.startswith("gated") else {},
            )
        elif path in (f"/api/models/{self.name}/revision/{one}" for one in ("main", COMMIT)):
            names = [
                str(file.relative_to(self.folder))
                for file in sorted(self.folder.rglob("*"))
                if file.is_file()
            ]
            siblings = (
                [{"rfilename": name} for name in names] if self.siblings is None else self.siblings
            )
            reply(
                handler,
                200,
                json.dumps({"id": self.name, "sha": COMMIT, "siblings": siblings}).encode(),
            )
        elif path.startswith(f"/api/models/{self.name}/"):
            reply(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(prefix := f"/{self.name}/resolve/{COMMIT}/"):
            name = path.removeprefix(prefix)
            if not (self.folder / name).is_file():
                reply(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            elif name.endswith(".safetensors"):
                reply(
                    handler, 302, b"Found", {"Location": f"{self.store}/store/{name}?signature=1"}
                )
            else:
                self.content(handler, name)
        else:
            reply(handler, 401, b"Invalid username or password.")

    def read(self, name: str) -> tuple[memoryview, str]:
        """Return a file and its digest, read once for as long as the file stays the same."""
        file = self.folder / name
        state = (file.stat().st_mtime_ns, file.stat().st_size)
        with self.lock:
            if self._read.get(name, (None,))[0] != state:
                data = file.read_bytes()
                digest = hashlib.sha256(data).hexdigest()[:16]
                self._read[name] = (state, memoryview(data), digest)
            return self._read[name][1:]

    def content(self, handler, name: str) -> None:
        data, digest = self.read(name)
        etag = f'"{digest}-{self.versions[name]}"'
        asked = handler.headers.get("Range")
        if asked is None:
            reply(handler, 200, data, {"ETag": etag})
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        with self.lock:
            self.ranges.append((name, start, stop))
        if self.misbehave is not None and self.misbehave(self, handler, name, start, stop):
            return
        if start >= len(data):
            reply(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        else:
            reply(
                handler,
                206,
                data[start:stop],
                {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "ETag": etag},
            )


def reply(
    handler,
    status: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    length: int | None = None,
) -> None:
    """`length`: a Content-Length other than the body's."""
    handler.send_response(status)
    for key, value in (headers or {}).items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)
    if length is not None and length != len(body):
        handler.close_connection = True


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
    """Return a server of a folder that is the Hub from now on."""
    hub = Hub(folder, **options)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    return hub

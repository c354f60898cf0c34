"""Reading over HTTP for a checkpoint that stays where it is: whole small files and ranges of large
ones, with retries.

Plain `http.client` connections, kept open per thread and server. Proxies come from the environment,
as for urllib.
"""

from __future__ import annotations

import base64
import http.client
import random
import re
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import RemoteError, printable

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = (
    7  # with pauses of 0.2, 0.5, 1.25, 3, 8 and 20 seconds between them, some half a minute in all
)
FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 0.2, 2.5, 60.0
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # conditions that may pass
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 6
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HTTPStatus(Exception):
    """An answer that no retry will change. The caller knows what was asked for and makes it an
    `IqforgeError`.
    """

    def __init__(self, status: int, reason: str, headers: http.client.HTTPMessage | None = None):
        super().__init__(f"HTTP {status} {reason}")
        self.status, self.headers = status, headers or http.client.HTTPMessage()


class _Passing(Exception):
    """A failure after which another attempt makes sense; `pause`: seconds that the server asks for."""

    def __init__(self, message: str, pause: float | None = None):
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file, the size of the whole file, and what marks its version (ETag, or "")."""

    data: bytes
    size: int
    etag: str


class RangeClient:
    """`token`: sent to the host of the URLs that are asked for, never to one that these redirect
    to.
    """

    def __init__(self, token: str | None = None, agent: str = "iqforge"):
        self._headers = {"User-Agent": agent, "Accept-Encoding": "identity"}
        self._token = token
        self._local = threading.local()
        self._tls = ssl.create_default_context()
        self._resolved: dict[
            str, str
        ] = {}  # redirections found so far; those of the Hub are signed and hold for minutes
        self._stopped = threading.Event()

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def stop(self) -> None:
        """No further attempts: readers that wait give up."""
        self._stopped.set()

    def get(self, url: str, limit: int) -> bytes:
        """The whole of a file of at most `limit` bytes. HTTPStatus, RemoteError."""

        def attempt() -> bytes:
            with _Answer(self, url, {}) as answer:
                answer.expect(200)
                if (size := answer.header_number("Content-Length")) is not None and size > limit:
                    raise RemoteError(f"is {size} bytes long, at most {limit} are read", file=url)
                data = answer.read(limit + 1 if size is None else size)
                if len(data) > limit:
                    raise RemoteError(f"is longer than the {limit} bytes that are read", file=url)
                if size is not None and len(data) < size:
                    raise _Passing(f"the connection ended after {len(data)} of {size} bytes")
                return data

        return self._retried(url, attempt)

    def get_range(
        self, url: str, start: int, stop: int, known: FileRange | None = None
    ) -> FileRange:
        """Bytes start to stop, or fewer where the file ends before. What breaks off is continued,
        not begun again.

        `known`: an earlier part; RemoteError if the file has another size or ETag now. RemoteError
        for a server that ignores or misreads ranges and after all attempts, HTTPStatus for other
        answers.
        """
        pieces: list[bytes] = []
        seen = known

        def attempt() -> FileRange:
            nonlocal seen
            done = sum(map(len, pieces))
            with _Answer(self, url, {"Range": f"bytes={start + done}-{stop - 1}"}) as answer:
                if answer.status == 200:
                    raise RemoteError(
                        "the server ignores ranges and sends whole files; download the model and"
                        " convert the folder",
                        file=url,
                    )
                answer.expect(206, 416)
                first, last, size = answer.content_range()
                now = FileRange(b"", size, (answer.headers.get("ETag") or "").removeprefix("W/"))
                _check_same(url, seen, now)
                seen = now
                if answer.status == 416:
                    if start + done < size:
                        raise RemoteError(
                            f"the server refuses the range from byte {start + done}, the file has"
                            f" {size} bytes",
                            file=url,
                        )
                    return FileRange(b"".join(pieces), size, now.etag)
                wanted = min(stop, size) - start - done
                if first != start + done or last - first + 1 > wanted:
                    raise RemoteError(
                        f"was asked for bytes {start + done} to {stop - 1} and sent {first} to"
                        f" {last} of {size}",
                        file=url,
                    )
                data = answer.read(last - first + 1)
                pieces.append(data)
                if len(data) < wanted:
                    raise _Passing(
                        f"the connection ended after {done + len(data)} of {done + wanted} bytes"
                    )
                return FileRange(b"".join(pieces), size, now.etag)

        return self._retried(url, attempt)

    def _retried(self, url: str, attempt: Callable):
        for number in range(ATTEMPTS):
            try:
                return attempt()
            except ssl.SSLCertVerificationError as error:
                raise RemoteError(
                    f"the server's certificate is not trusted: {error.verify_message}", file=url
                ) from None
            except (_Passing, OSError, http.client.HTTPException) as error:
                self.drop_connections()
                self._resolved.pop(url, None)
                pause = getattr(error, "pause", None)
                if pause is None:
                    pause = FIRST_PAUSE * GROWTH**number * random.uniform(0.75, 1.25)
                if number == ATTEMPTS - 1 or self._stopped.wait(min(pause, LONGEST_PAUSE)):
                    raise RemoteError(
                        f"cannot be read after {number + 1} attempts:"
                        f" {printable(error) or type(error).__name__}",
                        file=url,
                    ) from None

    # --- connections

    def open(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """The answer after redirections. HTTPStatus if there are too many of them or one leads from
        https to elsewhere.
        """
        target = self._resolved.get(url, url)
        remembered = target != url
        for _ in range(_MAX_REDIRECTS):
            answer = self._request(target, headers, with_token=_server(target) == _server(url))
            if remembered and answer.status in (401, 403, 404, 410):
                self.drop_connections()  # a signed address that has expired: ask for another
                target, remembered = url, False
                continue
            if (
                answer.status not in _REDIRECTS
                or (location := answer.headers.get("Location")) is None
            ):
                if target != url and answer.status < 400:
                    self._resolved[url] = target
                return answer
            answer.read(1 << 16)
            if not answer.isclosed():
                self.drop_connections()
            following = urllib.parse.urljoin(target, location)
            if _server(following)[0] not in ("http", "https") or (
                _server(target)[0],
                _server(following)[0],
            ) == ("https", "http"):
                raise HTTPStatus(answer.status, f"redirects to {printable(following)}")
            target = following
        raise HTTPStatus(310, "too many redirections")

    def _request(
        self, url: str, headers: dict[str, str], with_token: bool
    ) -> http.client.HTTPResponse:
        scheme, host, port = _server(url)
        pool = self._local.__dict__.setdefault("connections", {})
        connection = pool.get((scheme, host, port))
        if connection is None:
            connection = pool[scheme, host, port] = self._connection(scheme, host, port)
        parts = urllib.parse.urlsplit(url)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        if getattr(connection, "asks_with_whole_url", False):
            path = urllib.parse.urlunsplit(
                (parts.scheme, parts.netloc, parts.path or "/", parts.query, "")
            )
        sent = (
            self._headers
            | headers
            | ({"Authorization": f"Bearer {self._token}"} if with_token and self._token else {})
        )
        connection.request("GET", path, headers=sent | getattr(connection, "proxy_headers", {}))
        return connection.getresponse()

    def _connection(self, scheme: str, host: str, port: int) -> http.client.HTTPConnection:
        proxy = (
            None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
        )
        if proxy is None:
            if scheme == "https":
                return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._tls)
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        through = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        authorization = {}
        if through.username:
            login = f"{urllib.parse.unquote(through.username)}:{urllib.parse.unquote(through.password or '')}"
            authorization = {
                "Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()
            }
        if scheme == "https":
            connection = http.client.HTTPSConnection(
                through.hostname, through.port or 80, timeout=TIMEOUT, context=self._tls
            )
            connection.set_tunnel(host, port, authorization)
            return connection
        connection = http.client.HTTPConnection(
            through.hostname, through.port or 80, timeout=TIMEOUT
        )
        connection.asks_with_whole_url, connection.proxy_headers = True, authorization
        return connection

    def drop_connections(self) -> None:
        """Close those of the calling thread."""
        for connection in self._local.__dict__.pop("connections", {}).values():
            connection.close()


class _Answer:
    """One answer; its connection is given up unless the body was read to its end."""

    def __init__(self, client: RangeClient, url: str, headers: dict[str, str]):
        self._client, self._url = client, url
        self._answer = client.open(url, headers)
        self.status, self.headers = self._answer.status, self._answer.headers

    def expect(self, *statuses: int) -> None:
        if self.status in _PASSING:
            after = self.headers.get("Retry-After") or ""
            raise _Passing(
                f"HTTP {self.status} {self._answer.reason}",
                float(after) if after.isdecimal() and len(after) < 6 else None,
            )
        if self.status not in statuses:
            raise HTTPStatus(self.status, self._answer.reason, self.headers)

    def header_number(self, name: str) -> int | None:
        text = self.headers.get(name) or ""
        return int(text) if text.isdecimal() and len(text) < 20 else None

    def content_range(self) -> tuple[int, int, int]:
        """(first, last, size of the file)"""
        text = self.headers.get("Content-Range") or ""
        match = _CONTENT_RANGE.fullmatch(text.strip()) if len(text) < 80 else None
        if match is None or (match[1] is None) != (self.status == 416):
            raise RemoteError(
                f"the server answers a range with Content-Range '{printable(text)}'", file=self._url
            )
        return int(match[1] or 0), int(match[2] or 0), int(match[3])

    def read(self, n_bytes: int) -> bytes:
        """`n_bytes` bytes, or fewer where the connection breaks off."""
        pieces, missing = [], n_bytes
        try:
            while missing and (piece := self._answer.read(min(missing, 1 << 20))):
                pieces.append(piece)
                missing -= len(piece)
        except (OSError, http.client.HTTPException):
            pass  # what has come is kept; the caller asks for the rest
        return b"".join(pieces)

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *exception) -> None:
        if not self._answer.isclosed():
            self._client.drop_connections()


def _server(url: str) -> tuple[str, str, int]:
    parts = urllib.parse.urlsplit(url)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or (443 if parts.scheme == "https" else 80),
    )


def _check_same(url: str, seen: FileRange | None, now: FileRange) -> None:
    if seen is not None and seen.size != now.size:
        raise RemoteError(
            f"has changed while it was read: it had {seen.size} bytes, now it has {now.size}",
            file=url,
        )
    if seen is not None and seen.etag and now.etag and seen.etag != now.etag:
        raise RemoteError(
            f"has changed while it was read: its ETag was {printable(seen.etag)}, now it is"
            f" {printable(now.etag)}",
            file=url,
        )

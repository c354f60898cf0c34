"""Read ranges of large files and whole small ones over HTTP, with retries.

Weights are read through plain connections (`connections.py`) and not through the session of
huggingface_hub, because its HTTP client takes about twice the CPU time per byte
(docs/benchmarks/convert.md).
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ...errors import RemoteError, printable
from .connections import Connections, HTTPStatus

# Pauses of 0.2, 0.5, 1.25, 3, 8 and 20 seconds between attempts, about half a minute in all.
ATTEMPTS = 7
FIRST_PAUSE, GROWTH, LONGEST_PAUSE = 0.2, 2.5, 60.0
RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
T = TypeVar("T")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class RetryableError(Exception):
    """A failure after which another attempt makes sense. `pause`: the seconds that the server asks
    for, if any.
    """

    def __init__(self, message: str, pause: float | None = None):
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file, the size of the whole file, and its version (the ETag, or "")."""

    data: bytes
    size: int
    etag: str


class RangeClient:
    """Read files with `headers`. The token among them (Authorization) goes to the host of the URL,
    never to one that it redirects to.
    """

    def __init__(self, headers: Mapping[str, str]):
        self._connections = Connections(headers)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make no further attempts: threads that wait to retry give up."""
        self._stopped.set()

    def get(self, url: str, limit: int) -> bytes:
        """Return a whole file of at most `limit` bytes. Raise HTTPStatus or RemoteError."""

        def attempt() -> bytes:
            with _Response(self._connections, url, {}) as response:
                response.expect(200)
                if (size := response.header_number("Content-Length")) is not None and size > limit:
                    raise RemoteError(f"the file has {size} bytes; the limit is {limit}", file=url)
                data = response.read(limit + 1 if size is None else size)
                if len(data) > limit:
                    raise RemoteError(f"the file has more than {limit} bytes, the limit", file=url)
                if size is not None and len(data) < size:
                    raise RetryableError(f"the connection ended after {len(data)} of {size} bytes")
                return data

        return self.retried(url, attempt)

    def get_range(
        self, url: str, start: int, stop: int, known: FileRange | None = None
    ) -> FileRange:
        """Return bytes `start` to `stop`, fewer where the file ends. An interrupted download is
        continued, not started again.

        `known` is an earlier range of the file. Raise RemoteError if its size or ETag has changed,
        if the server ignores or misreads ranges, and after the last attempt; HTTPStatus for other
        responses.
        """
        pieces: list[bytes] = []
        seen = known

        def attempt() -> FileRange:
            nonlocal seen
            done = sum(map(len, pieces))
            with _Response(
                self._connections, url, {"Range": f"bytes={start + done}-{stop - 1}"}
            ) as response:
                if response.status == 200:
                    raise RemoteError(
                        "the server ignores ranges and sends whole files; download the model and"
                        " convert the folder",
                        file=url,
                    )
                response.expect(206, 416)
                first, last, size = response.content_range()
                now = FileRange(b"", size, (response.headers.get("ETag") or "").removeprefix("W/"))
                _check_same(url, seen, now)
                seen = now
                if response.status == 416:
                    if start + done < size:
                        raise RemoteError(
                            f"the server refuses the range from byte {start + done}, but the file"
                            f" has {size} bytes",
                            file=url,
                        )
                    return FileRange(b"".join(pieces), size, now.etag)
                wanted = min(stop, size) - start - done
                if first != start + done or last - first + 1 > wanted:
                    raise RemoteError(
                        f"the server sends bytes {first} to {last} of {size} where"
                        f" {start + done} to {stop - 1} were asked for",
                        file=url,
                    )
                data = response.read(last - first + 1)
                pieces.append(data)
                if len(data) < wanted:
                    raise RetryableError(
                        f"the connection ended after {done + len(data)} of {done + wanted} bytes"
                    )
                return FileRange(b"".join(pieces), size, now.etag)

        return self.retried(url, attempt)

    def retried(
        self, url: str, attempt: Callable[[], T], attempts: int = 0, seconds: float = 0
    ) -> T:
        """Return `attempt()`, repeated after failures that may pass: `attempts` times (by default
        ATTEMPTS), and no longer than `seconds` if these are given.
        """
        attempts = attempts or ATTEMPTS
        end = time.monotonic() + seconds
        for number in range(1, attempts + 1):
            try:
                return attempt()
            except (RetryableError, OSError, http.client.HTTPException) as error:
                if (certificate := _certificate_error(error)) is not None:
                    raise RemoteError(
                        f"the server's certificate is not trusted: {certificate.verify_message}",
                        file=url,
                    ) from None
                self._connections.forget(url)
                pause = error.pause if isinstance(error, RetryableError) else None
                if pause is None:
                    pause = FIRST_PAUSE * GROWTH ** (number - 1) * random.uniform(0.75, 1.25)
                last = number == attempts or (seconds and time.monotonic() + pause >= end)
                if last or self._stopped.wait(min(pause, LONGEST_PAUSE)):
                    tries = f"{number} attempts" if number > 1 else "1 attempt"
                    raise RemoteError(
                        f"reading failed after {tries}: {printable(error) or type(error).__name__}",
                        file=url,
                    ) from None
        raise AssertionError("the last attempt returns or raises")


class _Response:
    """One response. Its connection is closed unless the body was read to its end."""

    def __init__(self, connections: Connections, url: str, headers: dict[str, str]):
        self._connections, self._url = connections, url
        self._answer = connections.open(url, headers)
        self.status, self.headers = self._answer.status, self._answer.headers

    def expect(self, *statuses: int) -> None:
        if self.status in RETRY_STATUSES:
            after = self.headers.get("Retry-After") or ""
            raise RetryableError(
                f"HTTP {self.status} {self._answer.reason}",
                float(after) if after.isdecimal() and len(after) < 6 else None,
            )
        if self.status not in statuses:
            raise HTTPStatus(self.status, self._answer.reason, self.headers)

    def header_number(self, name: str) -> int | None:
        text = self.headers.get(name) or ""
        return int(text) if text.isdecimal() and len(text) < 20 else None

    def content_range(self) -> tuple[int, int, int]:
        """Return the first and last byte that are sent, and the size of the file."""
        text = self.headers.get("Content-Range") or ""
        match = _CONTENT_RANGE.fullmatch(text.strip()) if len(text) < 80 else None
        if match is None or (match[1] is None) != (self.status == 416):
            raise RemoteError(
                f"the server answers a range with Content-Range '{printable(text)}'", file=self._url
            )
        return int(match[1] or 0), int(match[2] or 0), int(match[3])

    def read(self, n_bytes: int) -> bytes:
        """Return `n_bytes` bytes, fewer if the connection breaks off. The caller requests the
        rest.
        """
        pieces, missing = [], n_bytes
        with contextlib.suppress(OSError, http.client.HTTPException):
            while missing and (piece := self._answer.read(min(missing, 1 << 20))):
                pieces.append(piece)
                missing -= len(piece)
        return b"".join(pieces)

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *exception) -> None:
        if not self._answer.isclosed():
            self._connections.drop()


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _check_same(url: str, seen: FileRange | None, now: FileRange) -> None:
    if seen is not None and seen.size != now.size:
        raise RemoteError(
            f"the file has changed while it was read: it had {seen.size} bytes, now it has"
            f" {now.size}",
            file=url,
        )
    if seen is not None and seen.etag and now.etag and seen.etag != now.etag:
        raise RemoteError(
            f"the file has changed while it was read: its ETag was {printable(seen.etag)}, now it"
            f" is {printable(now.etag)}",
            file=url,
        )

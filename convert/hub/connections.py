"""HTTP connections that are kept for the next request, and redirections that are remembered.

Connections are plain `http.client` ones, kept open per thread and server; proxies come from the
environment, as for urllib.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping

from ...errors import printable

TIMEOUT = 30.0  # seconds without a byte
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 6


class HTTPStatus(Exception):
    """A response that no retry will change. The caller knows the purpose of the request and raises
    the `IqforgeError`.
    """

    def __init__(self, status: int, reason: str, headers: http.client.HTTPMessage | None = None):
        super().__init__(f"HTTP {status} {reason}")
        self.status, self.reason = status, reason
        self.headers = headers or http.client.HTTPMessage()


class Connections:
    """Send requests with `headers`. The token among them (Authorization) goes to the host of the
    URL, never to one that it redirects to. Errors of connections are OSError and HTTPException.
    """

    def __init__(self, headers: Mapping[str, str]):
        # The names are normalized, so that none is sent twice.
        self._headers = {key.title(): value for key, value in headers.items()}
        self._headers["Accept-Encoding"] = "identity"
        self._local = threading.local()
        self._tls = ssl.create_default_context()
        # The redirections found so far. Those of the Hub are signed and last for minutes.
        self._redirected: dict[str, str] = {}

    def open(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Return the response after redirections. Raise HTTPStatus if there are too many of them
        or one leads from https to anything else.
        """
        target = self._redirected.get(url, url)
        remembered = target != url
        for _ in range(_MAX_REDIRECTS):
            response = self._request(target, headers, with_token=_server(target) == _server(url))
            if remembered and response.status in (401, 403, 404, 410):
                self.drop()  # the signature has expired: request another one
                target, remembered = url, False
                continue
            if (
                response.status not in _REDIRECTS
                or (location := response.headers.get("Location")) is None
            ):
                if target != url and response.status < 400:
                    self._redirected[url] = target
                return response
            response.read(1 << 16)
            if not response.isclosed():
                self.drop()
            following = urllib.parse.urljoin(target, location)
            if _server(following)[0] not in ("http", "https") or (
                _server(target)[0],
                _server(following)[0],
            ) == ("https", "http"):
                raise HTTPStatus(response.status, f"redirects to {printable(following)}")
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
        sent = self._headers | headers
        if not with_token:
            sent.pop("Authorization", None)
        if isinstance(connection, _ProxyConnection):
            path = urllib.parse.urlunsplit(
                (parts.scheme, parts.netloc, parts.path or "/", parts.query, "")
            )
            sent |= connection.proxy_headers
        connection.request("GET", path, headers=sent)
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
        through_host, authorization = through.hostname or "", {}
        if through.username:
            login = ":".join(map(urllib.parse.unquote, (through.username, through.password or "")))
            authorization = {
                "Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()
            }
        if scheme == "https":
            connection = http.client.HTTPSConnection(
                through_host, through.port or 80, timeout=TIMEOUT, context=self._tls
            )
            connection.set_tunnel(host, port, authorization)
            return connection
        return _ProxyConnection(through_host, through.port or 80, authorization)

    def forget(self, url: str) -> None:
        """Close the connections of the calling thread, and forget where `url` redirects to."""
        self.drop()
        self._redirected.pop(url, None)

    def drop(self) -> None:
        """Close the connections of the calling thread."""
        for connection in self._local.__dict__.pop("connections", {}).values():
            connection.close()


class _ProxyConnection(http.client.HTTPConnection):
    """A connection to a proxy. Requests name whole URLs."""

    def __init__(self, host: str, port: int, proxy_headers: dict[str, str]):
        super().__init__(host, port, timeout=TIMEOUT)
        self.proxy_headers = proxy_headers


def _server(url: str) -> tuple[str, str, int]:
    parts = urllib.parse.urlsplit(url)
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or (443 if parts.scheme == "https" else 80),
    )

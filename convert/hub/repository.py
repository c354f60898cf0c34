"""Repositories of the Hugging Face Hub, or of a server that speaks its scheme (HF_ENDPOINT): files,
addresses, access.

{endpoint}/api/models/{repository}/revision/{revision}   JSON: "sha", "siblings": [{"rfilename"}]
{endpoint}/{repository}/resolve/{sha}/{file}             the file, usually after a redirection
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from ...errors import NotFoundError, RemoteError, UsageError, printable
from .http_ranges import FileRange, HTTPStatus, RangeClient

SCHEME = "hf://"
DEFAULT_ENDPOINT = "https://huggingface.co"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_LISTING = 64 << 20


@dataclass(frozen=True)
class Address:
    """`name` is `organization/model`; `revision` a branch, tag or commit."""

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `organization/model[@revision]`, with or without `hf://`. UsageError."""
        name, at, revision = text.removeprefix(SCHEME).partition("@")
        if (
            not _NAME.fullmatch(name)
            or ".." in name
            or (at and not revision)
            or not revision.isprintable()
        ):
            raise UsageError(
                f"'{printable(text)}' is not a repository: expected organization/model or"
                " organization/model@revision"
            )
        return cls(name, revision or "main")

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def access_token() -> str | None:
    """HF_TOKEN, else what `hf auth login` has stored (HF_TOKEN_PATH, HF_HOME). UsageError for one
    that cannot be a token.
    """
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
        path = Path(
            os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))
        )
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the access token of the Hub (HF_TOKEN) has characters that no token has")
    return token or None


class Repository:
    """One repository at one commit. `files`: names of all its files, checked to lie inside it."""

    def __init__(self, address: Address):
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise RemoteError("HF_HUB_OFFLINE is set", file=str(address))
        self.endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise UsageError(
                f"HF_ENDPOINT is '{printable(self.endpoint)}', expected an http or https address"
            )
        self.name = address.name
        self.client = RangeClient(access_token())
        self._known: dict[str, FileRange] = {}
        self.commit = address.revision
        self.commit, self.files = self._listing(address)

    def label(self, file: str = "") -> str:
        """What errors call a file of the repository."""
        commit = self.commit[:8] if _COMMIT.fullmatch(self.commit) else self.commit
        return f"{self.name}@{commit}" + (f"/{file}" if file else "")

    def url(self, file: str) -> str:
        return f"{self.endpoint}/{self.name}/resolve/{urllib.parse.quote(self.commit, safe='')}/{urllib.parse.quote(file)}"

    def get(self, file: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes. NotFoundError, RemoteError."""
        return self._asked(file, lambda: self.client.get(self.url(file), limit))

    def get_range(self, file: str, start: int, stop: int) -> FileRange:
        """Bytes start to stop, or fewer where the file ends. NotFoundError, RemoteError; the latter
        also if the file has changed since it was first read.
        """
        part = self._asked(
            file, lambda: self.client.get_range(self.url(file), start, stop, self._known.get(file))
        )
        self._known.setdefault(file, FileRange(b"", part.size, part.etag))
        return part

    def _listing(self, address: Address) -> tuple[str, frozenset[str]]:
        url = f"{self.endpoint}/api/models/{address.name}/revision/{urllib.parse.quote(address.revision, safe='')}"
        try:
            answer = json.loads(self._asked("", lambda: self.client.get(url, _MAX_LISTING)))
            commit, names = answer["sha"], [entry["rfilename"] for entry in answer["siblings"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RemoteError(
                f"the answer of {url} is no description of a repository ({type(error).__name__})",
                file=str(address),
            ) from None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RemoteError(
                f"its commit is given as '{printable(commit)}', expected 40 hexadecimal digits",
                file=str(address),
            )
        for name in names:
            parts = name.split("/") if isinstance(name, str) else [""]
            if not name or any(
                part in ("", ".", "..") or "\\" in part or not part.isprintable() for part in parts
            ):
                raise RemoteError(
                    f"lists a file '{printable(name)}', which cannot be the name of one",
                    file=str(address),
                )
        return commit, frozenset(names)

    def _asked(self, file: str, ask):
        try:
            return ask()
        except RemoteError as error:
            raise RemoteError(error.message, file=self.label(file)) from None
        except HTTPStatus as error:
            raise self._refusal(error, file) from None

    def _refusal(self, error: HTTPStatus, file: str) -> RemoteError | NotFoundError:
        """What the Hub means by a status; it says more in X-Error-Code."""
        code, page = error.headers.get("X-Error-Code") or "", f"{self.endpoint}/{self.name}"
        given = (
            "the access token was sent"
            if self.client.has_token
            else "no access token was found (HF_TOKEN)"
        )
        if code == "GatedRepo" or (
            error.status == 403 and "gated" in (error.headers.get("X-Error-Message") or "").lower()
        ):
            return RemoteError(
                f"access is gated: accept its terms on {page} with the account of your token;"
                f" {given}",
                file=self.label(file),
            )
        if code == "RevisionNotFound":
            return NotFoundError(
                f"the repository has no revision '{printable(self.commit)}'", file=self.label(file)
            )
        if code == "EntryNotFound" or (error.status == 404 and file):
            return NotFoundError("the repository has no such file", file=self.label(file))
        if error.status in (
            401,
            404,
        ):  # to the unknown the Hub does not tell what is private and what does not exist
            return NotFoundError(
                f"there is no such repository at {self.endpoint}, or it is private; {given}",
                file=self.label(file),
            )
        if error.status == 403:
            return RemoteError(f"access is forbidden; {given}", file=self.label(file))
        return RemoteError(f"the server answers {error}", file=self.label(file))

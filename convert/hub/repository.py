"""Repositories of the Hugging Face Hub, or of another server with its API (HF_ENDPOINT).

huggingface_hub lists the files, builds their addresses, finds the access token and explains
refusals; `RangeClient` reads the bytes.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, ModelInfo, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, validate_repo_id

from ...errors import NotFoundError, RemoteError, UsageError, printable
from ...version import __version__
from .connections import HTTPStatus
from .http_ranges import RETRY_STATUSES, FileRange, RangeClient, RetryableError

SCHEME = "hf://"
# The first request is given up after this time, so that a machine without a network fails soon. A
# download that has begun survives longer interruptions.
FIRST_CONTACT_SECONDS = 6.0
_FIRST_CONTACT_ATTEMPTS = 3
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """`name` is `organization/model`; `revision` a branch, tag or commit."""

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `organization/model[@revision]`, with or without `hf://`. Raise UsageError."""
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
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise UsageError(printable(error)) from None
        return cls(name, revision or "main")

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def access_token() -> str | None:
    """Return the token that huggingface_hub finds (HF_TOKEN, or what `hf auth login` stored).
    Raise UsageError for one that no HTTP header can carry.
    """
    token = get_token()
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise UsageError("the access token of the Hub (HF_TOKEN) has invalid characters")
    return token


class Repository:
    """One repository at one commit. `files`: the names of all its files."""

    def __init__(self, address: Address):
        if constants.is_offline_mode():
            raise RemoteError("HF_HUB_OFFLINE is set", file=str(address))
        # The environment first: huggingface_hub reads it once, when it is imported.
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise UsageError(
                f"HF_ENDPOINT is '{printable(self.endpoint)}', expected an http or https address"
            )
        self.name = address.name
        token = access_token()
        self._has_token = token is not None
        headers = build_hf_headers(
            token=token or False, library_name="iqforge", library_version=__version__
        )
        self._api = HfApi(endpoint=self.endpoint, token=False, headers=headers)
        self.client = RangeClient(headers)
        self._known: dict[str, FileRange] = {}
        self.commit = address.revision
        self.commit, self.files = self._listing(address)

    def label(self, file: str = "") -> str:
        """Return what errors call a file of the repository."""
        commit = self.commit[:8] if _COMMIT.fullmatch(self.commit) else self.commit
        return f"{self.name}@{commit}" + (f"/{file}" if file else "")

    def url(self, file: str) -> str:
        """Return the address of a file at this commit."""
        return hf_hub_url(self.name, file, revision=self.commit, endpoint=self.endpoint)

    def get(self, file: str, limit: int) -> bytes:
        """Return a whole file of at most `limit` bytes. Raise NotFoundError or RemoteError."""
        return self._asked(file, lambda: self.client.get(self.url(file), limit))

    def get_range(self, file: str, start: int, stop: int) -> FileRange:
        """Return bytes `start` to `stop`, fewer where the file ends. Raise NotFoundError or
        RemoteError; the latter also if the file has changed since it was first read.
        """
        found = self._asked(
            file, lambda: self.client.get_range(self.url(file), start, stop, self._known.get(file))
        )
        self._known.setdefault(file, FileRange(b"", found.size, found.etag))
        return found

    def _listing(self, address: Address) -> tuple[str, frozenset[str]]:
        def attempt() -> ModelInfo | HfHubHTTPError:
            try:
                return self._api.model_info(
                    address.name, revision=address.revision, timeout=FIRST_CONTACT_SECONDS / 2
                )
            except httpx2.TimeoutException:
                raise RetryableError("timed out, the server does not answer") from None
            except httpx2.TransportError as error:
                raise RetryableError(printable(error) or type(error).__name__) from error
            except HfHubHTTPError as error:
                if error.response.status_code in RETRY_STATUSES:
                    raise RetryableError(_status(error.response)) from None
                return error  # an OSError, which would be retried

        def first_contact() -> ModelInfo:
            try:
                found = self._within(
                    FIRST_CONTACT_SECONDS + 1,
                    lambda: self.client.retried(
                        self.endpoint, attempt, _FIRST_CONTACT_ATTEMPTS, FIRST_CONTACT_SECONDS
                    ),
                )
            except RemoteError as error:
                raise RemoteError(
                    f"{self.endpoint}: {error.message}; check the network, HF_ENDPOINT and the"
                    " proxy settings"
                ) from None
            if isinstance(found, HfHubHTTPError):
                raise found
            return found

        try:
            info = self._asked("", first_contact)
            commit, names = info.sha, [sibling.rfilename for sibling in info.siblings or ()]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RemoteError(
                f"{self.endpoint} does not describe the repository as the Hub does"
                f" ({type(error).__name__})",
                file=str(address),
            ) from None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RemoteError(
                f"the server gives '{printable(commit)}' as the commit, expected 40 hexadecimal"
                " digits",
                file=str(address),
            )
        for name in names:
            parts = name.split("/") if isinstance(name, str) else [""]
            if not name or any(
                part in ("", ".", "..") or "\\" in part or not part.isprintable() for part in parts
            ):
                raise RemoteError(
                    f"the repository lists a file '{printable(name)}', which is not a valid file"
                    " name",
                    file=str(address),
                )
        return commit, frozenset(names)

    def _within(self, seconds: float, ask: Callable[[], T]) -> T:
        """Return `ask()`. Raise RemoteError after `seconds`, even while a name is being resolved,
        which no timeout of a request covers.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(ask())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="first contact", daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not results:
            self.client.stop()
            raise RemoteError(f"the server does not answer within {seconds:.0f} s")
        return results[0]

    def _asked(self, file: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RemoteError as error:
            raise RemoteError(error.message, file=self.label(file)) from None
        except OfflineModeIsEnabled:
            raise RemoteError("HF_HUB_OFFLINE is set", file=self.label(file)) from None
        except HTTPStatus as error:
            response = httpx2.Response(
                error.status,
                headers=[(key, printable(value)) for key, value in error.headers.items()],
                request=httpx2.Request("GET", self.url(file)),
            )
            try:
                hf_raise_for_status(response)
            except HfHubHTTPError as named:
                raise self._refusal(named, file) from None
            raise RemoteError(f"the server answers {error}", file=self.label(file)) from None
        except HfHubHTTPError as error:
            raise self._refusal(error, file) from None

    def _refusal(self, error: HfHubHTTPError, file: str) -> RemoteError | NotFoundError:
        """Return the meaning of an error of the Hub. Without access, it does not distinguish
        private repositories from missing ones.
        """
        status, label = error.response.status_code, self.label(file)
        message = error.response.headers.get("X-Error-Message", "").lower()
        given = (
            "the access token was sent"
            if self._has_token
            else "no access token was found (HF_TOKEN)"
        )
        if isinstance(error, GatedRepoError) or (status == 403 and "gated" in message):
            return RemoteError(
                f"access is gated: accept its terms on {self.endpoint}/{self.name} with the account"
                f" of your token; {given}",
                file=label,
            )
        if isinstance(error, RevisionNotFoundError):
            return NotFoundError(
                f"the repository has no revision '{printable(self.commit)}'", file=label
            )
        if isinstance(error, EntryNotFoundError) or (status == 404 and file):
            return NotFoundError("the repository has no such file", file=label)
        if status in (401, 404):
            return NotFoundError(
                f"there is no such repository at {self.endpoint}, or it is private; {given}",
                file=label,
            )
        if status == 403:
            return RemoteError(f"access is forbidden; {given}", file=label)
        return RemoteError(f"the server answers {_status(error.response)}", file=label)


def _status(response: httpx2.Response) -> str:
    return f"HTTP {response.status_code} {response.reason_phrase}"

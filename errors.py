"""Errors that reach a user: one class per cause, each naming file, tensor and byte offset where
they are known.

Library code raises these and nothing else for bad input; `cli.py` prints them as one line and exits
with 1. Anything that is not an `IqforgeError` is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import os


def utf_8(text: str) -> str:
    """Return `text` as it reads where the locale's encoding, such as ASCII, has made escapes of
    UTF-8 bytes; as it is where it has none, or is not UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return text


def printable(text: object, limit: int = 200) -> str:
    """Return `text` with control characters escaped and its length bounded, so that names from a
    hostile file can be shown.
    """
    text = utf_8(str(text))
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text[:limit]
    )
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


class IqforgeError(Exception):
    """Base of every error a user can cause. `where` parts are put in front of the message."""

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ):
        self.message, self.file, self.tensor, self.offset = message, file, tensor, offset
        super().__init__(message)

    def __str__(self) -> str:
        where = []
        if self.file is not None:
            where.append(printable(os.fspath(self.file), 400) or "''")
        if self.tensor is not None:
            where.append(f"tensor '{printable(self.tensor)}'")
        if self.offset is not None:
            where.append(f"at byte {self.offset}")
        return ": ".join([", ".join(where), self.message] if where else [self.message])


class UsageError(IqforgeError):
    """A flag or argument that cannot be used as given."""


class NotFoundError(IqforgeError):
    """A file, folder or shard that should be there is not."""


class MalformedFileError(IqforgeError):
    """A file that contradicts its format: wrong magic, impossible count, overlapping data."""


class TruncatedFileError(MalformedFileError):
    """A file that ends before what its header promises."""


class SplitError(MalformedFileError):
    """Shards of a split model that do not belong together, are missing, or were opened through the
    wrong one.
    """


class UnknownTypeError(IqforgeError):
    """A ggml type name or id that the type table does not have."""


class UnsupportedTypeError(IqforgeError):
    """A known ggml type for which this version cannot do what was asked."""


class ShapeError(IqforgeError):
    """Rows or row lengths that a type, a tensor or an importance vector cannot have."""


class NonFiniteError(IqforgeError):
    """NaN or infinity in values that must be finite."""


class CheckpointError(IqforgeError):
    """A Hugging Face checkpoint that is incomplete or contradicts itself."""


class RemoteError(IqforgeError):
    """A server that does not give what a remote checkpoint needs: refused, unreachable, changed,
    without ranges.
    """


class ConfigError(CheckpointError):
    """A missing or impossible key in config.json, or in the metadata of a GGUF file."""


class TokenizerError(IqforgeError):
    """A vocabulary that cannot be read or reproduced."""


class ChatTemplateError(IqforgeError):
    """A chat template that cannot be read, or that refuses the messages of a conversation."""


class ArchitectureError(IqforgeError):
    """A model class or GGUF architecture that is not supported."""


class ImatrixError(IqforgeError):
    """An importance matrix that is malformed or does not fit the model."""


class EvaluationError(IqforgeError):
    """A text, base file or context size with which an evaluation cannot run."""


class DeviceError(IqforgeError):
    """A GPU, its driver or the packages that compile for it failed, or memory does not suffice."""


class ValidationError(IqforgeError):
    """A file that was written does not read back as what the run made."""


class OutputError(IqforgeError):
    """An output that cannot be written: no space, no permission, the same file as an input."""


class ResumeError(OutputError):
    """An unfinished run that cannot be resumed, as something has changed since."""

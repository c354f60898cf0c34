"""Sequences in files: the tokens, and what layers keep of them.

8 bytes   IQFSTATE
8 bytes   length of the header, little-endian
header    JSON: version, model, settings, tokens, and per layer the first position and the
          values; a number as it is, a tensor as {"dtype", "shape", "at"}
data      tensors one after the other, at the offset `at` from here
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ...errors import IqforgeError, MalformedFileError, NotFoundError, TruncatedFileError
from ...formats.output import PartFile
from ...formats.source import Source
from ...formats.values import ValueType
from .sequence import State

_MAGIC, _VERSION = b"IQFSTATE", 1
_LONGEST_HEADER = 1 << 30
_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "uint8", "int8")
}
_HASHED = 64  # bytes of every tensor


def fingerprint(source: Source) -> str:
    """Return a digest of a model: its architecture's keys, and name, type, shape and first bytes of
    every tensor. Another quantization, a finetune or an adapter has another one.
    """
    digest = hashlib.sha256()
    for key, value in sorted(source.metadata.items()):
        if not key.startswith(("general.", "split.")) and value.type is not ValueType.ARRAY:
            digest.update(f"{key}={value.data!r}\n".encode("utf-8", "surrogatepass"))
    for tensor in source.tensors:
        digest.update(f"{tensor.name} {tensor.type} {tensor.shape}\n".encode("utf-8", "replace"))
        digest.update(source.read_bytes(tensor, 0, min(_HASHED, tensor.n_bytes)).tobytes())
    return digest.hexdigest()


def save_sequence(path: str | os.PathLike, state: State, tokens: list[int], source: Source) -> None:
    """Write the sequence of `state`, which has these tokens, of the model `source`. Raise
    ValueError for another number of tokens.
    """
    if len(tokens) != state.n_past:
        raise ValueError(f"{len(tokens)} tokens for a sequence of {state.n_past}")
    layers, data, at = [], [], 0
    for i, (first, values) in state.save().items():
        shown: list[Any] = []
        for value in values:
            if not isinstance(value, torch.Tensor):
                shown.append(value)
                continue
            data.append(value.cpu().contiguous())
            name = str(value.dtype).removeprefix("torch.")
            shown.append({"dtype": name, "shape": list(value.shape), "at": at})
            at += value.nbytes
        layers.append([i, first, shown])
    header = json.dumps(
        {
            "version": _VERSION,
            "model": fingerprint(source),
            "settings": _settings(state),
            "tokens": tokens,
            "layers": layers,
        }
    ).encode()
    with PartFile(path) as file:
        file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
        for tensor in data:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy())


class SavedSequence:
    """A file that `save_sequence` wrote. NotFoundError, MalformedFileError or TruncatedFileError
    for another one.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = path
        try:
            with open(path, "rb") as file:
                begin = file.read(16)
                length = int.from_bytes(begin[8:], "little")
                if begin[:8] != _MAGIC or len(begin) < 16 or length > _LONGEST_HEADER:
                    raise MalformedFileError("is not a prompt cache of iqforge", file=path)
                header = file.read(length)
                self._start = 16 + length
            self._size = os.path.getsize(path) - self._start
        except FileNotFoundError:
            raise NotFoundError("no such prompt cache", file=path) from None
        except OSError as error:
            raise MalformedFileError(f"cannot be read: {error.strerror}", file=path) from None
        try:
            found = json.loads(header)
            if found["version"] != _VERSION:
                raise MalformedFileError("is of another version of iqforge", file=path)
            self.model, self.settings = str(found["model"]), dict(found["settings"])
            self.tokens = [int(token) for token in found["tokens"]]
            self._layers = [(int(i), int(first), list(v)) for i, first, v in found["layers"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            problem = (
                "ends in its header" if len(header) < length else "has a header it cannot have"
            )
            kind = TruncatedFileError if len(header) < length else MalformedFileError
            raise kind(problem, file=path) from None

    def check(self, source: Source) -> None:
        """MalformedFileError if the file is of another model than `source`."""
        if self.model != fingerprint(source):
            raise MalformedFileError(
                "is a prompt cache of another model: choose another file, or remove it",
                file=self.path,
            )

    def restore(self, state: State) -> None:
        """Put the sequence into `state`, which is empty. MalformedFileError if it was saved with
        other settings of the cache, or does not suit the layers.
        """
        if self.settings != _settings(state):
            raise MalformedFileError(
                f"was saved with other types of the cache ({self.settings}): give the same -ctk,"
                " -ctv, -khad, -vhad and --swa-full",
                file=self.path,
            )
        try:
            data = np.memmap(self.path, np.uint8, "r", self._start) if self._size else np.empty(0)
            saved = {
                i: (first, tuple(self._value(data, value) for value in values))
                for i, first, values in self._layers
            }
            state.load(len(self.tokens), saved)
        except (IqforgeError, ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
            if isinstance(error, TruncatedFileError):
                raise
            raise MalformedFileError(
                "does not suit the layers of the model", file=self.path
            ) from None

    def _value(self, data: np.ndarray, shown: Any) -> Any:
        if not isinstance(shown, dict):
            return int(shown)
        dtype, shape, at = _DTYPES[shown["dtype"]], [int(n) for n in shown["shape"]], shown["at"]
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or not 0 <= at <= at + size <= self._size:
            raise TruncatedFileError("ends before its data", file=self.path)
        if not size:
            return torch.empty(shape, dtype=dtype)
        raw = torch.from_numpy(np.array(data[at : at + size], dtype=np.uint8))
        return raw.view(dtype).reshape(shape)


def _settings(state: State) -> dict[str, Any]:
    return asdict(state.settings)

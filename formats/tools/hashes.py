"""Hash the tensors of a GGUF model, one by one and as a whole, and check them against a manifest.

The bytes of the tensors are hashed without padding, in file order. Metadata is not hashed. Lines
are those of llama.cpp's `gguf-hash`:

    sha256    7c3b...  model.gguf:blk.0.attn_q.weight
    sha256    91d0...  model.gguf

A line consists of the name of the hash padded to 8, two spaces, hex digits, two spaces and the
place.

The uuid is of version 5: SHA-1 over a fixed namespace and all tensor bytes. Of a split model, the
first shard's name is used for all.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ...errors import MalformedFileError, NotFoundError, UsageError
from ..gguf.reader import GGUFFile, open_gguf
from ..options import checks_keywords

UUID_NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")
_PIECE = 16 << 20
MAX_MANIFEST_BYTES = 256 << 20
OK, MISMATCH, MISSING, NOT_IN_FILE = "Ok", "Mismatch", "Not in manifest", "Not in file"


class _Hash(Protocol):
    def update(self, data, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Uuid:
    def __init__(self) -> None:
        self._sha1 = hashlib.sha1(UUID_NAMESPACE.bytes, usedforsecurity=False)

    def update(self, data) -> None:
        self._sha1.update(data)

    def hexdigest(self) -> str:
        return str(uuid.UUID(bytes=self._sha1.digest()[:16], version=5))


# In the order in which the lines of a tensor come. The uuid is of the whole only.
ALGORITHMS: dict[str, Callable[[], _Hash]] = {
    "xxh64": lambda: xxhash.xxh64(),
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": lambda: hashlib.sha256(),
    "uuid": _Uuid,
}
_STRENGTH = ("sha256", "sha1", "xxh64", "uuid")
_LINE = re.compile(r"(\w+) +([0-9A-Fa-f-]+)  (.+)")


@dataclass(frozen=True)
class HashLine:
    """One hash; `tensor` is None for that of all tensors. `verdict` is set by `check_hashes`."""

    algorithm: str
    digest: str
    file: str
    tensor: str | None = None
    verdict: str = ""

    @property
    def place(self) -> str:
        """What the hash is of: FILE:TENSOR, or FILE for all tensors."""
        return self.file if self.tensor is None else f"{self.file}:{self.tensor}"

    def __str__(self) -> str:
        return f"{self.algorithm:<8}  {self.digest}  {self.place}" + (
            f"  -  {self.verdict}" if self.verdict else ""
        )


@checks_keywords
def hash_model(
    path: str | os.PathLike,
    algorithms: Sequence[str] = ("xxh64",),
    *,
    layers: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[HashLine]:
    """Yield the hashes of a GGUF model (of a split one through its first shard), tensor by tensor
    unless `layers` is false, then of the whole.

    progress: called with the number of bytes hashed since the last call. Raise UsageError for an
    unknown algorithm (known: `ALGORITHMS`), and the errors of `open_gguf`.
    """
    if unknown := [name for name in algorithms if name not in ALGORITHMS]:
        raise UsageError(f"unknown hash '{unknown[0]}'; known are {', '.join(ALGORITHMS)}")
    with open_gguf(path) as file:
        yield from _hashed(
            file,
            os.fspath(path),
            [name for name in ALGORITHMS if name in algorithms],
            layers,
            progress,
        )


def _hashed(
    file: GGUFFile,
    label: str,
    names: list[str],
    layers: bool,
    progress: Callable[[int], None] | None,
) -> Iterator[HashLine]:
    whole = {name: ALGORITHMS[name]() for name in names}
    # Each hash takes its bytes in order. Different hashes can run at the same time, as they release
    # the GIL.
    with ThreadPoolExecutor(max(1, min(8, 2 * len(names))), thread_name_prefix="hash") as pool:
        yield from _tensor_lines(file, label, names, layers, whole, pool, progress)
    yield from (HashLine(name, hashed.hexdigest(), label) for name, hashed in whole.items())


def _tensor_lines(
    file: GGUFFile,
    label: str,
    names: list[str],
    layers: bool,
    whole: dict[str, _Hash],
    pool: Executor,
    progress: Callable[[int], None] | None,
) -> Iterator[HashLine]:
    for tensor in file.tensors:
        own = {name: ALGORITHMS[name]() for name in names if layers and name != "uuid"}
        for start in range(0, tensor.n_bytes, _PIECE):
            piece = file.read_bytes(tensor, start, min(start + _PIECE, tensor.n_bytes))
            list(pool.map(_update, (*own.values(), *whole.values()), itertools.repeat(piece)))
            if progress is not None:
                progress(piece.nbytes)
        yield from (
            HashLine(name, hashed.hexdigest(), label, tensor.name) for name, hashed in own.items()
        )


def _update(hashed: _Hash, piece: np.ndarray) -> None:
    hashed.update(piece)


def read_manifest(path: str | os.PathLike) -> dict[tuple[str, str], str]:
    """Return {(algorithm, place): digest} of a manifest. Raise NotFoundError, or MalformedFileError
    naming the wrong line.
    """
    try:
        if os.path.getsize(path) > MAX_MANIFEST_BYTES:
            raise MalformedFileError(
                f"more than {MAX_MANIFEST_BYTES} bytes are not read as a manifest", file=path
            )
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror or error}", file=path) from None
    except UnicodeDecodeError as error:
        raise MalformedFileError("is not text", file=path, offset=error.start) from None
    entries = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] not in ALGORITHMS:
            raise MalformedFileError(
                f"line {number} is not a manifest line: '{line[:100]}'", file=path
            )
        entries[match[1], match[3]] = match[2].lower()
    if not entries:
        raise MalformedFileError("has no hashes", file=path)
    return entries


@checks_keywords
def check_hashes(
    path: str | os.PathLike,
    manifest: str | os.PathLike,
    algorithms: Iterable[str] = (),
    *,
    layers: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[HashLine]:
    """Yield the hashes of a model, each with a verdict: Ok, Mismatch or Not in manifest. Then yield
    what only the manifest has.

    algorithms: by default the strongest that the manifest has. The manifest may name the file with
    another folder in front. Raise UsageError if it has none of the hashes asked for.
    """
    entries = {(name, place): digest for (name, place), digest in read_manifest(manifest).items()}
    present = {name for name, _ in entries}
    chosen = list(algorithms) or [next(name for name in _STRENGTH if name in present)]
    if absent := [name for name in chosen if name not in present]:
        raise UsageError(
            f"the manifest has no {absent[0]} hashes; it has {', '.join(sorted(present))}",
            file=manifest,
        )
    label, seen = os.fspath(path), set()
    prefix = _prefix(label, (place for _, place in entries))
    for line in hash_model(path, chosen, layers=layers, progress=progress):
        key = (line.algorithm, prefix if line.tensor is None else f"{prefix}:{line.tensor}")
        seen.add(key)
        verdict = MISSING if key not in entries else OK if entries[key] == line.digest else MISMATCH
        yield HashLine(line.algorithm, line.digest, label, line.tensor, verdict)
    for (name, place), digest in entries.items():
        if (
            layers
            and name in chosen
            and (name, place) not in seen
            and place.startswith(f"{prefix}:")
        ):
            yield HashLine(name, digest, label, place[len(prefix) + 1 :], NOT_IN_FILE)


def _prefix(label: str, places: Iterable[str]) -> str:
    """Return the manifest's spelling of the file: as given, or a path that ends in the same
    name.
    """
    spellings = {place for place in places if os.path.basename(place) == os.path.basename(label)}
    return label if label in spellings or not spellings else sorted(spellings)[0]

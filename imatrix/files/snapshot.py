"""Snapshots to resume a collection from: `<out>.resume`, a GGUF file of sums in full precision.

Keys: `general.type` = `imatrix-snapshot`, `imatrix.datasets`, `imatrix.chunk_count` (chunks done),
`imatrix.chunk_size`, and one text `iqforge.run.<what>` for everything that the sums depend on.
Tensors: `<name>.in_sum2` F64 [n_matrices, n_cols] and `<name>.counts` F64 [n_matrices, 1] of every
entry, as the collector has them (the layouts of finished files have 32 bits); `run.<name>` F64 [1,
n] of other sums.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import numpy as np

from ...errors import ImatrixError
from ...formats.gguf.reader import GGUFFile, open_gguf
from ...formats.gguf.writer import GGUFWriter
from ...formats.source import Source, TensorInfo
from ...formats.types import TYPES
from ...formats.values import ValueType, array, get, string, u32
from ..data import Entry, Imatrix, Snapshot

_KIND, _RUN, _SUMS, _COUNTS = "imatrix-snapshot", "iqforge.run.", ".in_sum2", ".counts"


def save_snapshot(snapshot: Snapshot, path: str | os.PathLike, run: Mapping[str, str]) -> None:
    """Write a snapshot. `run` says what the sums depend on. The file gets its name only when it is
    complete.
    """
    imatrix, tensors, data = snapshot.imatrix, [], []
    values = {name + _SUMS: entry.sums for name, entry in imatrix.entries.items()}
    values |= {name + _COUNTS: entry.counts[:, None] for name, entry in imatrix.entries.items()}
    values |= {f"run.{name}": sums[None] for name, sums in snapshot.sums.items()}
    for name, array_ in values.items():
        tensors.append(TensorInfo(name, array_.shape, TYPES["F64"]))
        data.append(array_.astype("<f8", copy=False))
    metadata = {
        "general.type": string(_KIND),
        "imatrix.datasets": array(ValueType.STRING, list(imatrix.datasets)),
        "imatrix.chunk_count": u32(imatrix.chunk_count),
        "imatrix.chunk_size": u32(imatrix.chunk_size),
    }
    with GGUFWriter(
        path, metadata | {_RUN + key: string(value) for key, value in run.items()}, tensors
    ) as writer:
        for tensor, array_ in zip(tensors, data):
            writer.write(tensor, array_)


def load_snapshot(path: str | os.PathLike, run: Mapping[str, str]) -> Snapshot:
    """Load a snapshot. Raise ImatrixError, naming all differences, if it is not of a run like
    `run`, and the errors of any GGUF file.
    """
    path = os.fspath(path)
    with open_gguf(path) as file:
        if get(file.metadata, "general.type", str, "", file=path) != _KIND:
            raise ImatrixError("is not a snapshot of an interrupted collection", file=path)
        stored = {
            key.removeprefix(_RUN): get(file.metadata, key, str, file=path)
            for key in file.metadata
            if key.startswith(_RUN)
        }
        if changed := [key for key in {**stored, **run} if stored.get(key) != run.get(key)]:
            told = "; ".join(
                f"{key}: {_shown(stored.get(key))} then, {_shown(run.get(key))} now"
                for key in changed
            )
            raise ImatrixError(
                f"is a snapshot of another run and cannot be resumed by this one. {told}", file=path
            )
        entries, sums = {}, {}
        for tensor in file.tensors:
            if tensor.name.endswith(_SUMS):
                name = tensor.name.removesuffix(_SUMS)
                counts = _read(file, name + _COUNTS)[:, 0]
                if len(counts) != tensor.n_rows:
                    raise ImatrixError(
                        f"has {tensor.n_rows} rows of sums and {len(counts)} counts",
                        file=path,
                        tensor=name,
                    )
                whole = (counts == np.rint(counts)).all()
                entries[name] = Entry(
                    _read(file, tensor.name), counts.astype(np.int64) if whole else counts
                )
            elif tensor.name.startswith("run."):
                sums[tensor.name.removeprefix("run.")] = _read(file, tensor.name)[0]
        datasets = tuple(
            str(name) for name in get(file.metadata, "imatrix.datasets", list, file=path)
        )
        chunk_count = get(file.metadata, "imatrix.chunk_count", int, file=path)
        chunk_size = get(file.metadata, "imatrix.chunk_size", int, file=path)
        return Snapshot(Imatrix(entries, chunk_count, chunk_size, datasets, path), sums)


def model_fingerprint(source: Source) -> str:
    """Return a SHA-256 over the metadata and the first, middle and last rows of every tensor: fast
    for a model of any size.
    """
    digest = hashlib.sha256()
    for key, value in sorted(source.metadata.items()):
        digest.update(f"{key}={value!r}\n".encode("utf-8", "surrogatepass"))
    for tensor in source.tensors:
        digest.update(
            f"{tensor.name} {tensor.shape} {tensor.type.name}\n".encode("utf-8", "surrogatepass")
        )
        group = tensor.type.group_rows
        last = tensor.n_rows - group
        for start in sorted({0, last // 2 // group * group, last}):
            rows = source.read_rows(tensor, start, start + group)
            digest.update(np.ascontiguousarray(rows).data)
        source.release(tensor)
    return digest.hexdigest()


def _read(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensor(name)
    if tensor.type.name != "F64":
        raise ImatrixError(f"is {tensor.type}, expected F64", file=file.path, tensor=name)
    return (
        np.array(file.read_rows(tensor, 0, tensor.n_rows))
        .view("<f8")
        .reshape(tensor.n_rows, tensor.n_cols)
    )


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value[:16] if len(value) == 64 else value

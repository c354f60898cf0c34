"""The GGUF layout of importance matrices (llama.cpp).

Keys `general.type` = `imatrix`, `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`;
per entry, in order of names, F32 tensors `<name>.in_sum2` [n_matrices, n_cols] with raw sums of
squares and `<name>.counts` [n_matrices, 1] with token counts. Matrices of tensors that are not of
experts share one count, and their sums are one row.
"""

from __future__ import annotations

import os

import numpy as np

from ...errors import ImatrixError, printable
from ...formats.gguf.reader import GGUFFile, open_gguf
from ...formats.gguf.writer import GGUFWriter
from ...formats.source import TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import TYPES
from ...formats.values import ValueType, array, get, string, u32
from ..data import Entry, Imatrix, as_float32, check_count, check_values
from ..stored import OpenFile, StoredEntry

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST, _MOST_TOKENS = 2**32 - 1, 2**53


def load_gguf(path: str | os.PathLike) -> Imatrix:
    """Load a file. Raise ImatrixError for missing keys and for sums and counts that do not match,
    and the errors of any GGUF file.
    """
    path = os.fspath(path)
    with open_gguf(path) as file:
        kind = get(file.metadata, "general.type", str, "", file=path)
        missing = [
            key
            for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
            if key not in file.metadata
        ]
        if kind != "imatrix" or missing:
            lacking = f", {', '.join(missing)} missing" if missing else ""
            raise ImatrixError(
                f"is not an importance matrix: general.type is '{printable(kind)}'{lacking}",
                file=path,
            )
        tensors = {tensor.name: tensor for tensor in file.tensors}
        entries: dict[str, Entry] = {}
        files: dict[str, OpenFile] = {}
        for name in tensors:
            for suffix, other in ((_SUMS, _COUNTS), (_COUNTS, _SUMS)):
                stem = name.removesuffix(suffix)
                if stem != name and stem + other not in tensors:
                    raise ImatrixError(f"has no matching {stem + other}", file=path, tensor=name)
            if name.endswith(_SUMS):
                stem = name.removesuffix(_SUMS)
                entries[stem] = _entry(file, files, stem, tensors[name], tensors[stem + _COUNTS])
        if not entries:
            raise ImatrixError("has no entries", file=path)
        datasets = tuple(
            str(name) for name in get(file.metadata, "imatrix.datasets", list, file=path)
        )
        return Imatrix(
            entries,
            get(file.metadata, "imatrix.chunk_count", int, file=path),
            max(1, get(file.metadata, "imatrix.chunk_size", int, file=path)),
            datasets,
            path,
        )


def save_gguf(imatrix: Imatrix, path: str | os.PathLike) -> None:
    """Write a file. Counts of experts that saw nothing stay 0; readers give such experts ones.
    Raise ImatrixError if no tensor saw any input.
    """
    if not imatrix.entries:
        raise ImatrixError("there is nothing to write: no tensor saw any input", file=path)
    tensors, names = [], sorted(imatrix.entries)
    for name in names:
        entry = imatrix.entries[name]
        n = _n_counts(name, entry)
        shapes = ((n, entry.size // n), (n, 1)) if n > 1 else ((entry.size,), (1,))
        tensors += [
            TensorInfo(name + suffix, shape, TYPES["F32"])
            for suffix, shape in zip((_SUMS, _COUNTS), shapes)
        ]
    counts = (
        check_count(imatrix.chunk_count, _MOST, "number of chunks", path),
        check_count(imatrix.chunk_size, _MOST, "chunk size", path),
    )
    metadata = {
        "general.type": string("imatrix"),
        "imatrix.datasets": array(ValueType.STRING, list(imatrix.datasets)),
        "imatrix.chunk_count": u32(counts[0]),
        "imatrix.chunk_size": u32(counts[1]),
    }
    with GGUFWriter(path, metadata, tensors) as writer:
        for index, name in enumerate(names):
            entry = imatrix.entries[name]
            writer.write(tensors[2 * index], as_float32(entry.sums, name, path))
            writer.write(
                tensors[2 * index + 1],
                as_float32(entry.counts[: _n_counts(name, entry)], name, path),
            )


def _n_counts(name: str, entry: Entry) -> int:
    """Return the number of counts of an entry. Experts have one each; matrices that all see every
    row, such as those of heads in latent attention, share one.
    """
    if TensorName.parse(name).is_stacked or (entry.counts != entry.counts[0]).any():
        return len(entry.counts)
    return 1


def _entry(
    file: GGUFFile, files: dict[str, OpenFile], name: str, sums: TensorInfo, counts: TensorInfo
) -> Entry:
    for tensor in (sums, counts):
        if tensor.type.name != "F32":
            raise ImatrixError(
                f"is {tensor.type}, expected F32", file=file.path, tensor=tensor.name
            )
    n_matrices = counts.n_elements
    if sums.n_elements % n_matrices or (
        n_matrices > 1 and sums.shape[-1] * n_matrices != sums.n_elements
    ):
        raise ImatrixError(
            f"mismatched sums {list(sums.shape)} and counts {list(counts.shape)}",
            file=file.path,
            tensor=name,
        )
    path, offset = file.location(sums.name)
    stored = files.get(path) or files.setdefault(path, OpenFile(path))
    check_values(
        np.frombuffer(stored.read(offset, sums.n_bytes, "values"), "<f4"), sums.name, file.path
    )
    seen = file.read_bytes(counts, 0, counts.n_bytes).view("<f4")
    check_values(seen, counts.name, file.path)
    if seen.max() > _MOST_TOKENS:
        raise ImatrixError(
            f"a count is {seen.max():g}, expected at most {_MOST_TOKENS}",
            file=file.path,
            tensor=counts.name,
        )
    return StoredEntry(
        stored,
        offset,
        (n_matrices, sums.n_elements // n_matrices),
        np.rint(seen.astype(np.float64)).astype(np.int64),
    )

"""The GGUF layout of importance matrices (llama.cpp).

Keys `general.type` = `imatrix`, `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`; per entry, in order of names,
F32 tensors `<name>.in_sum2` [n_matrices, n_cols] with raw sums of squares and `<name>.counts` [n_matrices, 1] with token counts. Of tensors
that are not experts' the matrices share one count, and their sums are one row.
"""

from __future__ import annotations

import os

import numpy as np

from ..errors import ImatrixError, printable
from ..formats.gguf.reader import GGUFFile, open_gguf
from ..formats.gguf.values import ValueType, array, get, string, u32
from ..formats.gguf.writer import GGUFWriter
from ..formats.source import TensorInfo
from ..formats.types import TYPES
from .data import Entry, Imatrix, check_values

_SUMS, _COUNTS = ".in_sum2", ".counts"


def load_gguf(path: str | os.PathLike) -> Imatrix:
    """ImatrixError for missing keys and for sums and counts that do not fit together, beside the errors of any GGUF file."""
    path = os.fspath(path)
    with open_gguf(path) as file:
        kind = get(file.metadata, "general.type", str, "", file=path)
        missing = [key for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size") if key not in file.metadata]
        if kind != "imatrix" or missing:
            lacking = f", {', '.join(missing)} missing" if missing else ""
            raise ImatrixError(f"is not an importance matrix: general.type is '{printable(kind)}'{lacking}", file=path)
        tensors = {tensor.name: tensor for tensor in file.tensors}
        entries: dict[str, Entry] = {}
        for name in tensors:
            for suffix, other in ((_SUMS, _COUNTS), (_COUNTS, _SUMS)):
                stem = name.removesuffix(suffix)
                if stem != name and stem + other not in tensors:
                    raise ImatrixError(f"has no matching {stem + other}", file=path, tensor=name)
            if name.endswith(_SUMS):
                stem = name.removesuffix(_SUMS)
                entries[stem] = _entry(file, stem, tensors[name], tensors[stem + _COUNTS])
        if not entries:
            raise ImatrixError("has no entries", file=path)
        datasets = tuple(str(name) for name in get(file.metadata, "imatrix.datasets", list, file=path))
        return Imatrix(entries, get(file.metadata, "imatrix.chunk_count", int, file=path),
                       max(1, get(file.metadata, "imatrix.chunk_size", int, file=path)), datasets, path)


def save_gguf(imatrix: Imatrix, path: str | os.PathLike) -> None:
    """Counts of experts that saw nothing are kept as 0; readers give such experts ones."""
    if not imatrix.entries:
        raise ImatrixError("there is nothing to write: no tensor saw any input", file=path)
    f32, tensors, data = TYPES["F32"], [], []
    for name, entry in sorted(imatrix.entries.items()):
        entry = _as_stored(name, entry)
        n_matrices, n_cols = entry.sums.shape
        shapes = ((n_matrices, n_cols), (n_matrices, 1)) if n_matrices > 1 else ((n_cols,), (1,))
        for suffix, shape, values in ((_SUMS, shapes[0], entry.sums), (_COUNTS, shapes[1], entry.counts)):
            tensors.append(TensorInfo(name + suffix, shape, f32))
            data.append(values.astype("<f4"))
    metadata = {"general.type": string("imatrix"), "imatrix.datasets": array(ValueType.STRING, list(imatrix.datasets)),
                "imatrix.chunk_count": u32(imatrix.chunk_count), "imatrix.chunk_size": u32(imatrix.chunk_size)}
    with GGUFWriter(path, metadata, tensors) as writer:
        for tensor, values in zip(tensors, data, strict=True):
            writer.write(tensor, values)


def _as_stored(name: str, entry: Entry) -> Entry:
    """Matrices that all see every row, as those of heads in latent attention, have one count; experts have theirs."""
    if "_exps" in name or (entry.counts != entry.counts[0]).any():
        return entry
    return Entry(entry.sums.reshape(1, -1), entry.counts[:1])


def _entry(file: GGUFFile, name: str, sums: TensorInfo, counts: TensorInfo) -> Entry:
    for tensor in (sums, counts):
        if tensor.type.name != "F32":
            raise ImatrixError(f"is {tensor.type}, expected F32", file=file.path, tensor=tensor.name)
    n_matrices = counts.n_elements
    if sums.n_elements % n_matrices or (n_matrices > 1 and sums.shape[-1] * n_matrices != sums.n_elements):
        raise ImatrixError(f"mismatched sums {list(sums.shape)} and counts {list(counts.shape)}", file=file.path, tensor=name)
    values, seen = (np.concatenate([row.view("<f4") for row in file.read_rows(t, 0, t.n_rows)]).astype(np.float64) for t in (sums, counts))
    for tensor, array_ in ((sums, values), (counts, seen)):
        check_values(array_, tensor.name, file.path)
    return Entry(values.reshape(n_matrices, -1), np.rint(seen).astype(np.int64))

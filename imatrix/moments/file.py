"""The file of second moments: safetensors.

For each input NAME and fold F (`fit`, `hold`): `NAME.F.diag` F32 [n_matrices, n], mean squares;
`NAME.F.tri` F32 or BF16 [n_matrices, n (n + 1) / 2], the rows of the upper triangle of the
correlations H_ij / sqrt(H_ii H_jj); `NAME.F.count` I64 [n_matrices], tokens. Metadata: `format`,
`inputs` (JSON: the tensors that read each input, matrices, columns), `texts` (JSON: name, SHA-256,
tokens), `run` (JSON: what the sums depend on).

A snapshot to resume from holds `NAME.F.sum` F32, packed sums as they are, instead of `diag` and
`tri`, and `done` (JSON: chunks, rows left out, whether float16 was too narrow).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...errors import ImatrixError
from ..stored import OpenFile
from .collector import MomentSums
from .container import ArrayToWrite, StoredArray, read_arrays, write_arrays
from .data import FOLDS, MomentInput, correlations, pack, unpack

FORMAT, SNAPSHOT = "iqforge second moments 1", "iqforge second moments, unfinished 1"


def save_moments(
    total: MomentSums, path: str | os.PathLike, metadata: dict[str, Any], dtype: str = "f32"
) -> None:
    """Write a finished collection, with correlations as `dtype`: f32 or bf16."""
    pieces = []
    for one, fold, sums, counts in _entries(total):
        rows, n = one.n_matrices, one.n_cols
        key = f"{one.name}.{fold}"
        made = _Correlations(sums, counts, dtype)
        pieces += [
            ArrayToWrite(f"{key}.count", "I64", (rows,), lambda c=counts: iter([_i64(c)])),
            ArrayToWrite(f"{key}.diag", "F32", (rows, n), made.diagonals),
            ArrayToWrite(
                f"{key}.tri",
                dtype.upper(),
                (rows, one.triangle),
                made.triangles,
            ),
        ]
    write_arrays(path, pieces, {"format": FORMAT} | _described(total) | metadata)


def save_moments_snapshot(
    total: MomentSums, path: str | os.PathLike, metadata: dict[str, Any]
) -> None:
    """Write the sums of an unfinished collection."""
    pieces = []
    for one, fold, sums, counts in _entries(total):
        rows = one.n_matrices
        pieces += [
            ArrayToWrite(
                f"{one.name}.{fold}.count",
                "I64",
                (rows,),
                lambda c=counts: iter([_i64(c)]),
            ),
            ArrayToWrite(
                f"{one.name}.{fold}.sum",
                "F32",
                (rows, one.triangle),
                lambda s=sums: (pack(m.numpy(force=True)).astype("<f4").tobytes() for m in s),
            ),
        ]
    done = {"done": {"chunks": total.done, "dropped": total.dropped, "widened": total.widened}}
    write_arrays(path, pieces, {"format": SNAPSHOT} | _described(total) | done | metadata)


def load_moments_snapshot(
    path: str | os.PathLike, run: Mapping[str, str], total: MomentSums
) -> MomentSums:
    """Return the sums of a snapshot of a run like `run`, for the inputs of `total`. Raise
    ImatrixError, naming all differences, for a snapshot of another run.
    """
    file = _MomentsFile(path, SNAPSHOT)
    stored = file.json("run")
    if changed := [key for key in {**stored, **run} if stored.get(key) != run.get(key)]:
        raise ImatrixError(
            "is a snapshot of another run and cannot be resumed by this one. Different:"
            f" {', '.join(sorted(changed))}",
            file=file.path,
        )
    done = file.json("done")
    found = MomentSums(
        dict(total.inputs),
        done=int(done["chunks"]),
        dropped=int(done["dropped"]),
        widened=bool(done["widened"]),
    )
    for one in total.inputs.values():
        for fold in FOLDS:
            key, n = f"{one.name}.{fold}", one.n_cols
            if f"{key}.sum" not in file.tensors:
                continue
            packed = np.frombuffer(file.read(f"{key}.sum"), "<f4").reshape(one.n_matrices, -1)
            matrices = np.stack([unpack(row, n) for row in packed])
            found.sums[one.name, fold] = torch.from_numpy(matrices)
            counts = np.frombuffer(file.read(f"{key}.count"), "<i8").copy()
            found.counts[one.name, fold] = torch.from_numpy(counts)
    return found


class _MomentsFile:
    """A safetensors file of second moments, open, with its header checked."""

    def __init__(self, path: str | os.PathLike, kind: str):
        self.path = os.fspath(path)
        self._file = OpenFile(self.path)
        self.tensors, self._metadata = read_arrays(self._file)
        if self._metadata.get("format") != kind:
            raise ImatrixError(
                f"is not a file of second moments: its format is"
                f" '{self._metadata.get('format', '')[:80]}', expected '{kind}'",
                file=self.path,
            )

    def json(self, key: str) -> Any:
        """Return a value of the metadata. Raise ImatrixError if it is missing or not JSON."""
        try:
            return json.loads(self._metadata[key])
        except (KeyError, ValueError):
            raise ImatrixError(f"has no valid '{key}' in its metadata", file=self.path) from None

    def tensor(self, name: str) -> StoredArray:
        if name not in self.tensors:
            raise ImatrixError("is missing", file=self.path, tensor=name)
        return self.tensors[name]

    def read(self, name: str, first: int = 0, rows: int | None = None) -> bytes:
        """Return the bytes of `rows` rows of a tensor from row `first`, or of all."""
        tensor = self.tensor(name)
        total = max(1, tensor.shape[0])
        row = tensor.n_bytes // total
        return self._file.read(
            tensor.begin + first * row, row * (total - first if rows is None else rows), name
        )


class MomentsFile(_MomentsFile):
    """A finished file of second moments. Matrices stay in the file until they are asked for."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path, FORMAT)
        self.inputs = self._inputs()
        self.texts: list[dict[str, Any]] = self.json("texts")
        self.owners = {name: one.name for one in self.inputs.values() for name in one.tensors}

    def _inputs(self) -> dict[str, MomentInput]:
        found = {}
        for name, said in self.json("inputs").items():
            try:
                one = MomentInput(
                    name,
                    tuple(map(str, said["tensors"])),
                    int(said["matrices"]),
                    int(said["columns"]),
                )
            except (KeyError, TypeError, ValueError):
                raise ImatrixError("has no valid shape", file=self.path, tensor=name) from None
            for fold in self._folds_of(name):
                for part, width in (("diag", one.n_cols), ("tri", one.triangle)):
                    shape = self.tensor(f"{name}.{fold}.{part}").shape
                    if shape != (one.n_matrices, width):
                        raise ImatrixError(
                            f"has shape {list(shape)}, expected {[one.n_matrices, width]}",
                            file=self.path,
                            tensor=f"{name}.{fold}.{part}",
                        )
            found[name] = one
        return found

    def _folds_of(self, name: str) -> list[str]:
        return [fold for fold in FOLDS if f"{name}.{fold}.count" in self.tensors]

    def counts(self, name: str, fold: str) -> np.ndarray:
        """Return int64[n_matrices], the tokens that the matrices of an input saw in a fold."""
        if fold not in self._folds_of(name):
            return np.zeros(self.inputs[name].n_matrices, dtype=np.int64)
        return np.frombuffer(self.read(f"{name}.{fold}.count"), "<i8")

    def diagonal(self, name: str, fold: str) -> np.ndarray:
        """Return float64[n_matrices, n], mean squares; zeros for what saw nothing. Raise
        ImatrixError for one that is negative or not finite.
        """
        one = self.inputs[name]
        if fold not in self._folds_of(name):
            return np.zeros((one.n_matrices, one.n_cols))
        values = np.frombuffer(self.read(f"{name}.{fold}.diag"), "<f4").astype(np.float64)
        if not np.isfinite(values).all() or (values < 0).any():
            raise ImatrixError(
                "holds a mean square that is negative or not finite", file=self.path, tensor=name
            )
        return values.reshape(one.n_matrices, one.n_cols)

    def mean_on_device(self, name: str, fold: str) -> None:
        """Return None: a file is in the memory of the host."""

    def on_device(self, name: str, fold: str, index: int) -> None:
        """A file is not in the memory of a GPU."""

    def matrix(self, name: str, fold: str, index: int) -> np.ndarray:
        """Return float64[n, n], the second moments of matrix `index` of an input: E[x x^T]. Raise
        ImatrixError for values that are not finite.
        """
        one = self.inputs[name]
        stored = self.tensor(f"{name}.{fold}.tri")
        data = self.read(f"{name}.{fold}.tri", index, 1)
        if stored.dtype == "BF16":
            packed = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            packed = np.frombuffer(data, "<f4")
        if not np.isfinite(packed).all():
            raise ImatrixError("holds a value that is not finite", file=self.path, tensor=name)
        scale = np.sqrt(self.diagonal(name, fold)[index])
        found = unpack(packed.astype(np.float64), one.n_cols)
        found *= scale[:, None]
        found *= scale[None, :]
        return found


def load_moments(path: str | os.PathLike) -> MomentsFile:
    """Open a file of second moments. Raise ImatrixError for another file, and the errors of any
    safetensors file.
    """
    return MomentsFile(path)


class _Correlations:
    """Make the diagonal and the triangle of each matrix of an input and fold."""

    def __init__(self, sums: torch.Tensor, counts: torch.Tensor, dtype: str):
        self.sums, self.counts, self.dtype = sums, counts.tolist(), dtype

    def diagonals(self) -> Iterator[bytes]:
        for sums, count in zip(self.sums, self.counts):
            diagonal = np.diagonal(sums.numpy(force=True)).astype(np.float64)
            yield (diagonal / max(count, 1)).astype("<f4").tobytes()

    def triangles(self) -> Iterator[bytes]:
        for sums in self.sums:
            packed = torch.from_numpy(correlations(sums.numpy(force=True))[1])
            if self.dtype == "bf16":
                yield packed.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
            else:
                yield packed.numpy().astype("<f4").tobytes()


def _entries(
    total: MomentSums,
) -> Iterator[tuple[MomentInput, str, torch.Tensor, torch.Tensor]]:
    for one in total.inputs.values():
        for fold in FOLDS:
            if (one.name, fold) in total.sums:
                key = one.name, fold
                yield one, fold, total.sums[key], total.counts[key]


def _described(total: MomentSums) -> dict[str, Any]:
    return {
        "inputs": {
            one.name: {
                "tensors": list(one.tensors),
                "matrices": one.n_matrices,
                "columns": one.n_cols,
            }
            for one in total.inputs.values()
        }
    }


def _i64(counts: torch.Tensor) -> bytes:
    return counts.numpy(force=True).astype("<i8").tobytes()

"""Find the second moments of a tensor in a file, and turn a file into an importance matrix."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from ...errors import ImatrixError
from ...formats.tensor_names import TensorName
from ..data import Entry, Imatrix, alternatives, sees_latent_vectors
from ..stored import ComputedEntries
from .data import FOLDS, MomentInput
from .file import MomentsFile
from .store import DeviceSums, MomentStore

SHARES = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps")  # experts that see the same vectors
_KIND = "the file of second moments"


class StoredMoments:
    """The second moments of a tensor. Those of gate and up of an expert that saw few tokens are
    mixed with those of its layer, those of other matrices with their own diagonal: with as many
    tokens as columns, both count alike. An expert that saw nothing has those of its layer; its down
    matrix has equal importances and no correlations.
    """

    def __init__(self, file: MomentStore, one: MomentInput, tensor: str):
        self._file, self._one = file, one
        self._mixes = TensorName.parse(tensor).role in SHARES and one.n_matrices > 1
        self._lock = threading.Lock()
        self._layer: np.ndarray | None = None
        self._there: tuple[torch.Tensor, np.ndarray] | None = None

    def fit(self, index: int) -> np.ndarray:
        """Return float64[n_cols, n_cols], what matrix `index` is rounded with."""
        index = self._own(index)
        count, n = self.tokens(index), self._one.n_cols
        found = self._file.matrix(self._one.name, FOLDS[0], index) if count else np.eye(n)
        if self._one.n_matrices == 1:
            return found
        share = n / (n + count)
        prior = self._of_layer() if self._mixes else np.diag(np.diagonal(found))
        return (1 - share) * found + share * prior

    def hold(self, index: int) -> np.ndarray | None:
        """Return float64[n_cols, n_cols] of the held-out fold, or None if it saw nothing."""
        index = self._own(index)
        if not self._file.counts(self._one.name, FOLDS[1])[index]:
            return None
        return self._file.matrix(self._one.name, FOLDS[1], index)

    def on_device(self, index: int, hold: bool) -> DeviceSums | None:
        """Return what `fit` (or `hold`) of a matrix is made of, if it is on a GPU."""
        fold, index, name = FOLDS[1] if hold else FOLDS[0], self._own(index), self._one.name
        count = int(self._file.counts(name, fold)[index])
        mixed = self._one.n_matrices > 1 and not hold
        if not count and not (mixed and self._mixes):
            return None
        found = self._file.on_device(name, fold, index)
        if found is None or not mixed:
            return found
        share = self._one.n_cols / (self._one.n_cols + count)
        own, mean = found.diagonal, found.diagonal
        prior = self._layer_on_device() if self._mixes else None
        if prior is not None:
            prior, mean = prior
            own = own if count else np.ones_like(own)
        return replace(found, share=share, prior=prior, diagonal=(1 - share) * own + share * mean)

    def tokens(self, index: int) -> int:
        """Return how many vectors of matrix `index` were added up."""
        return int(self._file.counts(self._one.name, FOLDS[0])[self._own(index)])

    def origin(self, index: int) -> str:
        """Return whose vectors `fit` is of, in words."""
        if self._one.n_matrices == 1:
            return "all experts together"
        prior = "the layer" if self._mixes else "the diagonal alone"
        if not (count := self.tokens(index)):
            return prior if self._mixes else "nothing seen"
        return f"mostly {prior}" if count < self._one.n_cols else "their own"

    def _own(self, index: int) -> int:
        return 0 if self._one.n_matrices == 1 else index

    def _layer_on_device(self) -> tuple[torch.Tensor, np.ndarray] | None:
        """Return what `_of_layer` does on the GPU of the sums, and its diagonal."""
        with self._lock:
            if self._there is None:
                made = self._file.mean_on_device(self._one.name, FOLDS[0])
                if made is None:
                    return None
                self._there = made, made.diagonal().numpy(force=True).copy()
            return self._there

    def _of_layer(self) -> np.ndarray:
        """Return the mean over all experts, weighted by tokens."""
        with self._lock:
            if self._layer is not None:
                return self._layer
            counts = self._file.counts(self._one.name, FOLDS[0])
            total = np.zeros((self._one.n_cols, self._one.n_cols))
            for index in np.flatnonzero(counts):
                total += counts[index] * self._file.matrix(self._one.name, FOLDS[0], int(index))
            made = total / counts.sum() if counts.any() else np.eye(self._one.n_cols)
            self._layer = made
            return made


def moments_of(file: MomentStore, name: str, shape: tuple[int, ...]) -> StoredMoments | None:
    """Return the moments of tensor `name` with numpy-order `shape`, or None if there are none.

    Raise ImatrixError if they are of another size.
    """
    others = [] if sees_latent_vectors(name) else alternatives(name)
    tensor = next((one for one in [name, *others] if one in file.owners), None)
    if tensor is None:
        return None
    one = file.inputs[file.owners[tensor]]
    n_matrices = int(np.prod(shape[:-2], dtype=np.int64))
    if one.n_cols == shape[-1] and one.n_matrices in (1, n_matrices):
        return StoredMoments(file, one, tensor)
    if sees_latent_vectors(name):
        return None  # stored with the heads in one matrix, where the inputs were of each head
    raise ImatrixError(
        f"the second moments are those of {one.n_matrices} matrices of {one.n_cols} columns, shape"
        f" {list(shape)} needs {n_matrices} of {shape[-1]}",
        file=file.path,
        tensor=name,
    )


def imatrix_of(file: MomentsFile) -> Imatrix:
    """Return the importance matrix that the diagonals of both folds are."""
    n_ctx = int(file.json("run").get("n_ctx", 1))
    chunks = sum(int(text.get("tokens", 0)) for text in file.texts) // max(n_ctx, 1)
    names = tuple(str(text["name"]) for text in file.texts if text.get("name"))
    entries = ComputedEntries(sorted(file.owners), functools.partial(entry_of, file))
    return Imatrix(entries, chunks, n_ctx, names, file.path, _KIND)


def entry_of(file: MomentStore, name: str) -> Entry:
    """Return the diagonals of both folds as the entry of tensor `name`."""
    one = file.inputs[file.owners[name]]
    counts = {fold: file.counts(one.name, fold) for fold in FOLDS}
    sums = np.sum([file.diagonal(one.name, fold) * counts[fold][:, None] for fold in FOLDS], axis=0)
    total = np.sum(list(counts.values()), axis=0)
    parsed = TensorName.parse(name)
    if one.n_matrices == 1 and parsed.role in SHARES:  # one for all experts of the layer
        down = file.owners.get(parsed.sibling("ffn_down_exps.weight"))
        n = file.inputs[down].n_matrices if down else 1
        return Entry(np.repeat(sums, n, axis=0), np.repeat(total, n))
    return Entry(sums, total)


def with_all_experts(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return entries where one of all experts of a layer has a matrix for each expert."""
    found = {}
    for name, entry in entries.items():
        parsed = TensorName.parse(name)
        down = entries.get(parsed.sibling("ffn_down_exps.weight"))
        if parsed.is_stacked and entry.shape[0] == 1 and down is not None:
            n = down.shape[0]
            shape = n, entry.shape[1]
            entry = Entry(np.broadcast_to(entry.sums, shape), np.broadcast_to(entry.counts, n))
        found[name] = entry
    return found


def planned_entries(inputs: Iterable[MomentInput]) -> dict[str, Entry]:
    """Return entries with the names and shapes of all that inputs will give, to plan with. Their
    values are ones.
    """
    return with_all_experts(
        {
            name: Entry(
                np.broadcast_to(1.0, (one.n_matrices, one.n_cols)),
                np.ones(one.n_matrices, dtype=np.int64),
            )
            for one in inputs
            for name in one.tensors
        }
    )

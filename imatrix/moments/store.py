"""Where second moments are looked up: a file of them, or sums in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .collector import MomentSums
from .data import MomentInput


@dataclass(frozen=True)
class DeviceSums:
    """Sums float32[n, n] on a GPU, which are second moments when they are divided by `count`;
    `diagonal` float64[n] of the moments is on the host.
    """

    sums: torch.Tensor
    count: int
    diagonal: np.ndarray

    @property
    def device(self) -> int:
        """Return the number of the GPU."""
        return self.sums.device.index or 0


class MomentStore(Protocol):
    """Second moments of inputs; `owners` names the input that each tensor reads."""

    @property
    def path(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, MomentInput]: ...

    @property
    def owners(self) -> Mapping[str, str]: ...

    def counts(self, name: str, fold: str) -> np.ndarray:
        """Return int64[n_matrices], the tokens that the matrices of an input saw in a fold."""
        ...

    def diagonal(self, name: str, fold: str) -> np.ndarray:
        """Return float64[n_matrices, n], mean squares; zeros for what saw nothing."""
        ...

    def matrix(self, name: str, fold: str, index: int) -> np.ndarray:
        """Return float64[n, n], the second moments of matrix `index` of an input: E[x x^T]."""
        ...

    def on_device(self, name: str, fold: str, index: int) -> DeviceSums | None:
        """Return what `matrix` divides, if it is in the memory of a GPU."""
        ...


class SumsInMemory:
    """A `MomentStore` of finished sums. path: of the model, for messages."""

    def __init__(self, total: MomentSums, path: str):
        self._total, self.path = total, path
        self.inputs = total.inputs
        self.owners = {name: one.name for one in total.inputs.values() for name in one.tensors}

    def counts(self, name: str, fold: str) -> np.ndarray:
        counts = self._total.counts.get((name, fold))
        n = self.inputs[name].n_matrices
        return np.zeros(n, dtype=np.int64) if counts is None else counts.numpy(force=True)

    def diagonal(self, name: str, fold: str) -> np.ndarray:
        one, sums = self.inputs[name], self._total.sums.get((name, fold))
        if sums is None:
            return np.zeros((one.n_matrices, one.n_cols))
        found = torch.diagonal(sums, dim1=1, dim2=2).numpy(force=True).astype(np.float64)
        return found / np.maximum(self.counts(name, fold), 1)[:, None]

    def matrix(self, name: str, fold: str, index: int) -> np.ndarray:
        found = self._total.sums[name, fold][index].numpy(force=True).astype(np.float64)
        return found / max(int(self.counts(name, fold)[index]), 1)

    def on_device(self, name: str, fold: str, index: int) -> DeviceSums | None:
        sums = self._total.sums.get((name, fold))
        if sums is None or sums.device.type != "cuda":
            return None
        count = max(int(self.counts(name, fold)[index]), 1)
        return DeviceSums(sums[index], count, self.diagonal(name, fold)[index])

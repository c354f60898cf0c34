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
    """Sums float32[n, n] on a GPU, which are second moments M when they are divided by `count`. A
    `share` above 0 mixes them: (1 - share) M + share P, where P is `prior` float64[n, n] on that
    GPU, or None for the diagonal of M. `diagonal` float64[n] of the result is on the host.
    """

    sums: torch.Tensor
    count: int
    diagonal: np.ndarray
    share: float = 0.0
    prior: torch.Tensor | None = None

    @property
    def device(self) -> int:
        """Return the number of the GPU."""
        return self.sums.device.index or 0


class MomentStore(Protocol):
    """Second moments of inputs; `owners` names the input that each tensor reads."""

    @property
    def path(self) -> str:
        """What messages name: the file of the moments, or the model they were collected from."""
        ...

    @property
    def inputs(self) -> Mapping[str, MomentInput]:
        """The inputs of matrices by the name of the tensor that owns their moments."""
        ...

    @property
    def owners(self) -> Mapping[str, str]:
        """For each tensor, the name of the input whose moments it uses."""
        ...

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

    def mean_on_device(self, name: str, fold: str) -> torch.Tensor | None:
        """Return float64[n, n], the mean over all matrices of an input weighted by tokens, if their
        sums are in the memory of a GPU.
        """
        ...


class SumsInMemory:
    """A `MomentStore` of finished sums. path: of the model, for messages."""

    def __init__(self, total: MomentSums, path: str):
        self._total, self.path = total, path
        self.inputs = total.inputs
        self.owners = {name: one.name for one in total.inputs.values() for name in one.tensors}
        self._diagonals: dict[tuple[str, str], np.ndarray] = {}

    def counts(self, name: str, fold: str) -> np.ndarray:
        counts = self._total.counts.get((name, fold))
        n = self.inputs[name].n_matrices
        return np.zeros(n, dtype=np.int64) if counts is None else counts.numpy(force=True)

    def diagonal(self, name: str, fold: str) -> np.ndarray:
        one, sums, key = self.inputs[name], self._total.sums.get((name, fold)), (name, fold)
        if sums is None:
            return np.zeros((one.n_matrices, one.n_cols))
        if key not in self._diagonals:
            found = torch.diagonal(sums, dim1=1, dim2=2).numpy(force=True).astype(np.float64)
            self._diagonals[key] = found / np.maximum(self.counts(name, fold), 1)[:, None]
        return self._diagonals[key]

    def matrix(self, name: str, fold: str, index: int) -> np.ndarray:
        found = self._total.sums[name, fold][index].numpy(force=True).astype(np.float64)
        return found / max(int(self.counts(name, fold)[index]), 1)

    def on_device(self, name: str, fold: str, index: int) -> DeviceSums | None:
        sums = self._total.sums.get((name, fold))
        if sums is None or sums.device.type != "cuda":
            return None
        count = max(int(self.counts(name, fold)[index]), 1)
        return DeviceSums(sums[index], count, self.diagonal(name, fold)[index])

    def mean_on_device(self, name: str, fold: str) -> torch.Tensor | None:
        sums = self._total.sums.get((name, fold))
        if sums is None or sums.device.type != "cuda":
            return None
        return mean_of(sums, self.counts(name, fold))


def mean_of(sums: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """Return float64[n, n], the mean of moments that sums float32[matrices, n, n] are of, weighted
    by counts; its bits are those of the CPU on every device.
    """
    n = sums.shape[-1]
    total = torch.zeros((n, n), dtype=torch.float64, device=sums.device)
    # Divisors are on the device: a quotient by a number of the host is a product there.
    divisors = torch.from_numpy(np.append(counts, counts.sum()).astype(np.float64)).to(sums.device)
    for index in np.flatnonzero(counts):
        total += (sums[index].double() / divisors[index]) * float(counts[index])
    if not counts.any():
        return torch.eye(n, dtype=torch.float64, device=sums.device)
    made = total / divisors[-1]
    if made.is_cuda:  # whoever uses it has another stream
        torch.cuda.synchronize(made.device)
    return made

"""The matrices of a file: on the CPU decoded when they are used, on GPUs in their memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...errors import MalformedFileError, ShapeError, UsageError
from ...formats.codecs import codec
from ...formats.source import Source, TensorInfo
from ...formats.types import GGMLType
from .encoded import DecodeCache, Matrix, Stacked
from .matrix import MatrixLike
from .placement import Placement
from .resident import LoadProgress, Resident, ResidentMatrix


class TensorStore:
    """The tensors of `source` as matrices on the devices that `placement` chooses.

    Those on GPUs are `resident.Resident`, which `load` or the first use fills. Single tensors can
    be replaced by other blocks.
    """

    def __init__(self, source: Source, placement: Placement, cache: DecodeCache):
        self.source, self.placement, self.cache = source, placement, cache
        self._resident: dict[str, Resident] = {}  # by the name of their first tensor
        self._replaced: dict[str, tuple[GGMLType, np.ndarray]] = {}

    def matrices(self, tensors: list[TensorInfo], n: int) -> Sequence[MatrixLike]:
        """Return n matrices. For stacks, matrix i has the rows of matrix i of every tensor; tensors
        with two dimensions are one matrix each.
        """
        device = self.placement.of(tensors[0].name)
        if device.type == "cpu":
            if len(tensors) == 1 or len(tensors[0].shape) == 2:
                return [
                    Matrix(self, tensor, index)
                    for tensor in tensors
                    for index in range(tensor.n_matrices)
                ]
            return [
                Stacked(*(Matrix(self, tensor, index) for tensor in tensors)) for index in range(n)
            ]
        resident = self._resident.setdefault(
            tensors[0].name, Resident(self.source, tensors, n, device)
        )
        return [ResidentMatrix(resident, index) for index in range(n)]

    @property
    def resident(self) -> list[Resident]:
        """The matrices on GPUs."""
        return list(self._resident.values())

    def stored(self, tensor: TensorInfo, start: int, stop: int) -> tuple[TensorInfo, np.ndarray]:
        """Return rows start..stop as they are stored, and the tensor with their type."""
        if (replaced := self._replaced.get(tensor.name)) is None:
            return tensor, self.source.read_rows(tensor, start, stop)
        return tensor.with_type(replaced[0]), replaced[1][start:stop]

    def decode(self, tensor: TensorInfo, stored: np.ndarray) -> torch.Tensor:
        """Return float32[rows, n_cols] on the CPU of uint8[rows, row_bytes] of `tensor`."""
        return torch.from_numpy(
            codec.decode(
                tensor.type, stored, tensor.n_cols, threads=torch.get_num_threads(), as_weights=True
            )
        )

    def replace(self, name: str, type: GGMLType, blocks: np.ndarray) -> None:
        """Use `blocks`, uint8[n_rows, row_bytes] of `type`, for the matrices of tensor `name` until
        `restore`. On a GPU only the reference path does, see `Resident.replace`.

        Vectors keep their values. Raise UsageError for a tensor on a GPU that is one matrix with
        others there, MalformedFileError for an unknown one, ShapeError for blocks of another size.
        """
        tensor = next((tensor for tensor in self.source.tensors if tensor.name == name), None)
        if tensor is None:
            raise MalformedFileError("tensor is missing", file=self.source.path, tensor=name)
        if blocks.shape != (expected := (tensor.n_rows, type.row_bytes(tensor.n_cols))):
            raise ShapeError(
                f"blocks have shape {list(blocks.shape)}, expected {list(expected)}", tensor=name
            )
        if (device := self.placement.of(name)).type != "cpu":
            if (resident := self._resident.get(name)) is None:
                raise UsageError(
                    f"is no matrix by itself on {device}, and cannot be replaced there", tensor=name
                )
            resident.replace(type, blocks)
            return
        self._replaced[name] = type, blocks
        self.cache.drop(name)

    def restore(self, name: str) -> None:
        """Undo `replace`, if there was one."""
        if (resident := self._resident.get(name)) is not None:
            resident.restore()
        self._replaced.pop(name, None)
        self.cache.drop(name)

    def load(self, progress: LoadProgress | None = None) -> None:
        """Copy matrices to their GPUs. `progress` is called with (bytes done, bytes in total) from
        time to time.
        """
        waiting = [resident for resident in self.resident if not resident.is_loaded]
        total, done = sum(resident.stored_bytes for resident in waiting), 0
        for resident in waiting:
            resident.load()
            done += resident.stored_bytes
            if progress is not None:
                progress(done, total)

    def release(self) -> None:
        """Free the memory of GPUs."""
        for resident in self.resident:
            resident.release()

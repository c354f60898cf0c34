"""The matrices of a file: on the CPU decoded when they are used, on GPUs in their memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...errors import MalformedFileError, ShapeError, UsageError
from ...formats.codecs import codec
from ...formats.source import Source, TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType
from .encoded import DEFAULT_CACHE_BYTES, DecodeCache, Matrix, Stacked
from .host_memory import available_memory
from .kept import can_be_kept, decoded, kept_rows
from .many import Matrices
from .matrix import MatrixLike
from .placement import Placement
from .resident import LoadProgress, Resident, ResidentMatrix
from .rounded import RoundedRows, can_be_rounded, packed_bytes

if TYPE_CHECKING:
    from ..simd.products import Rows

KEPT_SHARE = 0.7  # of the free memory, for tensors on the CPU as they are stored


class TensorStore:
    """The tensors of `source` as matrices on the devices that `placement` chooses.

    rounds: whether products with quantized weights are in 8 bits on the CPU. Tensors on GPUs are
    `resident.Resident`, which `load` or the first use fills. Single tensors can be replaced by
    other blocks.
    """

    def __init__(self, source: Source, placement: Placement, cache: DecodeCache):
        self.source, self.placement, self.cache = source, placement, cache
        self.rounds = False
        self._rounded_rows: RoundedRows | None = None
        self._resident: dict[str, Resident] = {}  # by the name of their first tensor
        self._replaced: dict[str, tuple[GGMLType, np.ndarray]] = {}
        self.replaced: set[str] = set()  # names of tensors that have other blocks
        self._kept: dict[str, Rows | None] = {}
        self._keep_bytes = -1
        self.n_changes = 0  # calls of `replace` and `restore`: what was kept before is outdated

    def matrices(self, tensors: list[TensorInfo], n: int) -> Sequence[MatrixLike]:
        """Return n matrices. For stacks, matrix i has the rows of matrix i of every tensor; tensors
        with two dimensions are one matrix each.
        """
        device = self.placement.of(tensors[0].name)
        if device.type == "cpu":
            if len(tensors) == 1:
                return Matrices(tensors[0].n_matrices, lambda i: Matrix(self, tensors[0], i))
            if len(tensors[0].shape) == 2:
                return Matrices(len(tensors), lambda i: Matrix(self, tensors[i]))
            return Matrices(n, lambda i: Stacked(*(Matrix(self, tensor, i) for tensor in tensors)))
        resident = self._resident.setdefault(
            tensors[0].name, Resident(self.source, tensors, n, device)
        )
        return Matrices(n, lambda i: ResidentMatrix(resident, i))

    @property
    def resident(self) -> list[Resident]:
        """The matrices on GPUs."""
        return list(self._resident.values())

    def stored(self, tensor: TensorInfo, start: int, stop: int) -> tuple[TensorInfo, np.ndarray]:
        """Return rows start..stop as they are stored, and the tensor with their type."""
        if (replaced := self._replaced.get(tensor.name)) is None:
            return tensor, self.source.read_rows(tensor, start, stop)
        return tensor.with_type(replaced[0]), replaced[1][start:stop]

    def type_of(self, tensor: TensorInfo) -> GGMLType:
        """Return the type of the blocks that are used for a tensor."""
        replaced = self._replaced.get(tensor.name)
        return tensor.type if replaced is None else replaced[0]

    def rounded_rows(self, x: torch.Tensor) -> RoundedRows:
        """Return x float32[rows, columns] in 8 bits. Those of the last x are kept: several matrices
        are multiplied with the same one.
        """
        rows = self._rounded_rows
        if rows is None or not rows.are_of(x):
            self._rounded_rows = rows = RoundedRows(x)
        return rows

    def stays_rounded(self, tensor: TensorInfo) -> bool:
        """Whether a cache of the default size holds the matrices of a tensor on the CPU in 8 bits
        together with all others that pass through it. If not, they are dropped before they are used
        again. Another size of the cache changes no digits, so it does not count.
        """
        return sum(self._rounded_bytes[: 1 + _is_of_experts(tensor)]) <= DEFAULT_CACHE_BYTES

    @functools.cached_property
    def _rounded_bytes(self) -> tuple[int, int]:
        """Bytes of all matrices on the CPU in 8 bits: those that all tokens use, and those of
        experts.
        """
        found = [0, 0]
        looked_up = {"per_layer_token_embd.weight"}
        if any(tensor.name == "output.weight" for tensor in self.source.tensors):
            looked_up.add("token_embd.weight")
        for tensor in self.source.tensors:
            if len(tensor.shape) < 2 or tensor.name in looked_up:
                continue
            is_here = self.placement.of(tensor.name).type == "cpu"
            if is_here and can_be_rounded(tensor.type, tensor.shape[-2], tensor.n_cols):
                found[_is_of_experts(tensor)] += packed_bytes(tensor.n_rows, tensor.n_cols)
        return found[0], found[1]

    def kept(self, tensor: TensorInfo) -> Rows | None:
        """Return the rows of a tensor on the CPU, in memory as they are stored but not interleaved.
        They are read at the first use, and stay. None if they do not fit, or if products cannot
        read the type.
        """
        if tensor.name not in self._kept:
            self._kept[tensor.name] = self._read_kept(tensor)
        return self._kept[tensor.name]

    def _read_kept(self, tensor: TensorInfo) -> Rows | None:
        if self._keep_bytes < 0:
            self._keep_bytes = int(KEPT_SHARE * (available_memory() or 0))
        if not can_be_kept(tensor.type, tensor.n_cols) or tensor.n_bytes > self._keep_bytes:
            return None
        tensor, stored = self.stored(tensor, 0, tensor.n_rows)
        self._keep_bytes -= stored.nbytes
        return kept_rows(tensor.type, stored, tensor.n_cols)

    def decode(self, tensor: TensorInfo, stored: np.ndarray) -> torch.Tensor:
        """Return float32[rows, n_cols] on the CPU of uint8[rows, row_bytes] of `tensor`."""
        # Norms of every model are F32: copying them needs no compiler.
        if tensor.type.name != "F32" and can_be_kept(tensor.type, tensor.n_cols):
            return decoded(tensor.type, stored, tensor.n_cols)
        return torch.from_numpy(
            codec.decode(
                tensor.type, stored, tensor.n_cols, threads=torch.get_num_threads(), as_weights=True
            )
        )

    def replace(self, name: str, type: GGMLType, blocks: np.ndarray) -> None:
        """Use `blocks`, uint8[n_rows, row_bytes] of `type`, for the matrices of tensor `name` until
        `restore`. On a GPU their layers run on the reference path meanwhile.

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
            self.replaced.add(name)
            return
        self._replaced[name] = type, blocks
        self.replaced.add(name)
        self._forget(name)

    def restore(self, name: str) -> None:
        """Undo `replace`, if there was one."""
        if (resident := self._resident.get(name)) is not None:
            resident.restore()
        self._replaced.pop(name, None)
        self.replaced.discard(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        """What was read of a tensor is not what it has now."""
        self.n_changes += 1
        self.cache.drop(name)
        if (kept := self._kept.pop(name, None)) is not None:
            self._keep_bytes += kept.data.nbytes

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


def _is_of_experts(tensor: TensorInfo) -> bool:
    name = TensorName.parse(tensor.name)
    return name.is_stacked or name.expert is not None

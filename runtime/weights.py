"""Where layers get their parameters from: tensors stay encoded in the mapped file and are decoded when they are used.

`Weights` hands out parameters by name and keeps a record of them, so that what a layer declares (role for quantization,
split among ranks) can be read from the loaded model, and a tensor that nobody asked for is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from ..errors import ArchitectureError, MalformedFileError, UnsupportedTypeError, printable
from ..formats import codec
from ..formats.source import Source, TensorInfo
from .linear import Embedding, ExpertLinear, Linear

DEFAULT_CACHE_BYTES = 512 * 2**20
SLICE_BYTES = 32 * 2**20  # of float32, for matrices that do not fit the cache


class DecodeCache:
    """Decoded matrices, least recently used out first, together never above `capacity` bytes."""

    def __init__(self, capacity: int = DEFAULT_CACHE_BYTES):
        self.capacity, self.used = capacity, 0
        self._entries: OrderedDict[tuple, torch.Tensor] = OrderedDict()

    def get(self, key: tuple, n_bytes: int, decode: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The matrix under `key`, of `n_bytes` (at most `capacity`), decoded now if it is not there."""
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            return found
        while self.used + n_bytes > self.capacity:  # before decoding: old and new must not exist together
            _, dropped = self._entries.popitem(last=False)
            self.used -= dropped.nbytes
            del dropped
        decoded = decode()
        self._entries[key] = decoded
        self.used += decoded.nbytes
        return decoded


class Matrix:
    """A 2-D matrix of `rows` x `cols` within a stored tensor, decoded to float32 on `device` on demand."""

    def __init__(self, weights: Weights, tensor: TensorInfo, index: int = 0):
        self.tensor = tensor
        self.rows, self.cols = tensor.shape[-2], tensor.shape[-1]
        self._weights, self._first, self._key = weights, index * self.rows, (tensor.name, index)

    def parts(self):
        """(first row, float32[rows, cols]) pieces covering the matrix: itself from the cache, or fresh slices if it is too large."""
        n_bytes, cache = 4 * self.rows * self.cols, self._weights.cache
        if n_bytes <= cache.capacity:
            yield 0, cache.get(self._key, n_bytes, lambda: self.decode(0, self.rows))
            return
        group = self.tensor.type.group_rows
        step = max(1, SLICE_BYTES // (4 * self.cols * group)) * group
        for start in range(0, self.rows, step):
            yield start, self.decode(start, min(start + step, self.rows))

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop; whole row groups for interleaved types."""
        weights = self._weights
        return weights.decode(self.tensor, weights.source.read_rows(self.tensor, self._first + start, self._first + stop))

    def gather(self, rows: np.ndarray) -> torch.Tensor:
        """float32[len(rows), cols]: the rows with these indices, without touching others."""
        group = self.tensor.type.group_rows
        groups, inverse = np.unique(rows // group, return_inverse=True)
        stored = self._weights.source.read_rows(self.tensor, self._first, self._first + self.rows)
        stored = stored.reshape(self.rows // group, -1)[groups].reshape(len(groups) * group, -1)
        decoded = self._weights.decode(self.tensor, stored)
        return decoded[torch.from_numpy(inverse * group + rows % group).to(decoded.device)]


class Weights:
    """The tensors of `source` as layers ask for them. `observers` are told every matrix product (see `Model.observe`)."""

    def __init__(self, source: Source, device: torch.device, cache: DecodeCache):
        self.source, self.device, self.cache = source, device, cache
        self.observers: list[Callable] = []
        self.parameters: list[Linear | ExpertLinear | Embedding] = []  # a tied embedding is in it twice: as table and as output
        self._tensors = {tensor.name: tensor for tensor in source.tensors}
        self._asked: set[str] = set()
        self._decodable = set(codec.decodable_types())

    def has(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str, n: int, *, optional: bool = False) -> torch.Tensor | None:
        """float32[n] on the device, or None where an optional one is absent."""
        if optional and not self.has(name):
            return None
        tensor = self._tensor(name, (n,))
        return self.decode(tensor, self.source.read_rows(tensor, 0, 1)).reshape(n)

    def linear(self, name: str, n_in: int, n_out: int, *, role: str, split: str) -> Linear:
        """`<name>.weight` with shape [n_out, n_in], and `<name>.bias` where the file has it."""
        matrix = Matrix(self, self._tensor(f"{name}.weight", (n_out, n_in)))
        return self._record(Linear(f"{name}.weight", matrix, self.vector(f"{name}.bias", n_out, optional=True), self.observers,
                                   role=role, split=split))

    def experts(self, name: str, n_experts: int, n_in: int, n_out: int, *, role: str, split: str) -> ExpertLinear:
        """`<name>_exps.weight` with shape [n_experts, n_out, n_in], or the `<name>.<expert>.weight` of very old files."""
        stacked = f"{name}_exps.weight"
        if self.has(stacked) or not self.has(f"{name}.0.weight"):
            tensor = self._tensor(stacked, (n_experts, n_out, n_in))
            matrices = [Matrix(self, tensor, expert) for expert in range(n_experts)]
        else:
            matrices = [Matrix(self, self._tensor(f"{name}.{expert}.weight", (n_out, n_in))) for expert in range(n_experts)]
        return self._record(ExpertLinear(stacked, matrices, self.observers, role=role, split=split))

    def embedding(self, name: str, n_rows: int, n_cols: int) -> Embedding:
        return self._record(Embedding(f"{name}.weight", Matrix(self, self._tensor(f"{name}.weight", (n_rows, n_cols)))))

    def n_rows_of(self, name: str) -> int:
        """Rows of the tensor `name`, which must be there."""
        return self._named(name).n_rows

    def decode(self, tensor: TensorInfo, stored: np.ndarray) -> torch.Tensor:
        """uint8[rows, row_bytes] of `tensor` to float32[rows, n_cols] on the device."""
        decoded = codec.decode(tensor.type, stored, tensor.n_cols, threads=torch.get_num_threads(), as_weights=True)
        return torch.from_numpy(decoded).to(self.device)

    def check_all_used(self) -> None:
        """ArchitectureError if the file has tensors that no layer asked for: evaluating without them would be another model."""
        unused = [name for name in self._tensors if name not in self._asked]
        if unused:
            shown = ", ".join(printable(name, 80) for name in unused[:4])
            raise ArchitectureError(f"{len(unused)} tensors of this file are not part of its architecture as this version knows it: {shown}"
                                    + (", ..." if len(unused) > 4 else ""), file=self.source.path)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self._named(name)
        # Writers drop or keep trailing dimensions of 1 as they please.
        stored, wanted = _without_ones(tensor.shape), _without_ones(shape)
        if stored != wanted:
            raise MalformedFileError(f"shape is {list(tensor.shape)}, but the metadata asks for {list(shape)}",
                                     file=self.source.path, tensor=name)
        if tensor.type.name not in self._decodable:
            raise UnsupportedTypeError(f"type {tensor.type} cannot be decoded yet", file=self.source.path, tensor=name)
        self._asked.add(name)
        return tensor if len(tensor.shape) == len(shape) else TensorInfo(tensor.name, shape, tensor.type)

    def _named(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise MalformedFileError("tensor is missing", file=self.source.path, tensor=name)
        return self._tensors[name]

    def _record(self, parameter):
        self.parameters.append(parameter)
        return parameter


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape

"""Weights in the memory of a GPU: packed for wide reads, and decoded there piece by piece for the
reference path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from ...errors import DeviceError, UsageError
from ...formats.source import Source, TensorInfo, WrappedSource
from ...formats.types import GGMLType

if TYPE_CHECKING:
    from ...cuda_kernels.packed.matrix import PackedMatrix
    from ...cuda_kernels.packed.pack import StoredRows

LoadProgress = Callable[[int, int], None]
PART_BYTES = 256 * 2**20  # of float32, decoded at a time
_READ_BYTES = 64 * 2**20  # of a tensor, read at a time


class Resident:
    """One or more tensors of the same type and shape on a GPU as one packed matrix of `n` matrices.

    Tensors with two dimensions are one matrix each. For stacks of n matrices, matrix i has the rows
    of matrix i of the first tensor, then those of the second, and so on.

    A type or row length that cannot be packed is kept as it is in the file: then `packed` is None,
    and only the reference path reads it.
    """

    def __init__(self, source: Source, tensors: Sequence[TensorInfo], n: int, device: torch.device):
        self.source, self.tensors, self.n, self.device = source, tuple(tensors), n, device
        self.type, self.cols = tensors[0].type, tensors[0].n_cols
        self.part_rows = tensors[0].shape[-2]  # of one tensor in one matrix
        self.rows = self.part_rows * len(tensors) * tensors[0].n_matrices // n
        self._packed: PackedMatrix | None = None
        self._stored: torch.Tensor | None = None  # uint8[all rows, row_bytes]
        self._original: tuple[GGMLType, PackedMatrix | None, torch.Tensor | None] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the GPU."""
        return self._packed is not None or self._stored is not None

    @property
    def is_packable(self) -> bool:
        """Whether the type and row length can be packed."""
        from ...cuda_kernels.packed.matrix import packable

        return packable(self.type, self.cols)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes in the file."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Return the bytes in the GPU's memory."""
        from ...cuda_kernels.packed.matrix import packed_bytes

        return (
            packed_bytes(self.type, self.n * self.rows, self.cols)
            if self.is_packable
            else self.stored_bytes
        )

    @property
    def packed(self) -> PackedMatrix | None:
        """The packed matrix; loads it first if necessary."""
        if not self.is_loaded:
            self.load()
        return self._packed

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """float32[stop - start, cols]; whole row groups if the type cannot be packed."""
        from ...cuda_kernels.packed.decode import decode_matrix

        if (packed := self.packed) is not None:
            return decode_matrix(packed, torch.float32, first_row=start, n_rows=stop - start)
        return self._decoded(self._blocks()[start:stop])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols] of rows int64 on the device."""
        from ...cuda_kernels.packed.decode import decode_rows

        if (packed := self.packed) is not None:
            return decode_rows(packed, rows.contiguous(), torch.float32)
        group = self.type.group_rows
        stored = self._blocks()
        groups = stored.view(-1, group, stored.shape[1])[rows // group]
        decoded = self._decoded(groups.flatten(0, 1)).view(len(rows), group, self.cols)
        return decoded[torch.arange(len(rows), device=rows.device), rows % group]

    def _decoded(self, stored: torch.Tensor) -> torch.Tensor:
        # Types that cannot be packed are rare, and importing their decoder takes a while.
        from ...formats.codecs.torch_decode import decode_torch

        return decode_torch(self.type, stored, self.cols, as_weights=True)

    def load(self) -> None:
        """Read, copy and pack. DeviceError naming the tensor if the memory does not suffice."""
        from ...cuda_kernels.packed.pack import pack_matrix
        from ...cuda_kernels.packed.repeat import repeat_rows

        try:
            n_rows = self.n * self.rows
            period = self.source.period(self.tensors[0]) if len(self.tensors) == 1 else n_rows
            if self.is_packable and period < n_rows:
                # Random weights repeat: copy one period and repeat it on the device.
                first = pack_matrix(
                    self.type,
                    [self.source.read_rows(self.tensors[0], 0, period)],
                    period,
                    self.cols,
                    1,
                    self.device,
                )
                self._packed = repeat_rows(first, self.rows, self.n)
            elif self.is_packable:
                self._packed = pack_matrix(
                    self.type, self._rows(), self.rows, self.cols, self.n, self.device
                )
            else:
                self._stored = torch.cat(
                    [torch.from_numpy(np.array(piece)).to(self.device) for piece in self._pieces()]
                )
        except torch.cuda.OutOfMemoryError:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise DeviceError(
                f"{self.device} has {free / 2**20:.0f} MiB free, {self.nbytes / 2**20:.0f} MiB and"
                " working memory are needed",
                file=self.source.path,
                tensor=self.tensors[0].name,
            ) from None

    def replace(self, type: GGMLType, blocks: np.ndarray) -> None:
        """Use `blocks`, uint8[n_rows, row_bytes] of `type`, until `restore`. What was loaded stays
        in memory meanwhile. Kernels of the fast path may still read that: only the reference path
        follows.

        Raise UsageError for a matrix of several tensors, and DeviceError as `load` does.
        """
        tensor, *others = self.tensors
        if others:
            raise UsageError(
                f"is one matrix with others on {self.device}, and cannot be replaced there alone",
                tensor=tensor.name,
            )
        self.restore()
        if not self.is_loaded:
            self.load()
        tensor = tensor.with_type(type)
        other = Resident(_Blocks(self.source, tensor, blocks), [tensor], self.n, self.device)
        other.load()
        self._original = self.type, self._packed, self._stored
        self.type, self._packed, self._stored = type, other._packed, other._stored

    def restore(self) -> None:
        """Undo `replace`, if there was one."""
        if self._original is not None:
            self.type, self._packed, self._stored = self._original
            self._original = None

    def _blocks(self) -> torch.Tensor:
        if self._stored is None:
            raise RuntimeError("the tensor is not loaded")
        return self._stored

    def release(self) -> None:
        """Free the memory; the next use reads the file again."""
        self.restore()
        self._packed = self._stored = None

    def _runs(self) -> list[tuple[TensorInfo, int, int]]:
        """Return (tensor, first row, last row) in the order of the packed matrix."""
        if len(self.tensors) == 1 or self.rows == self.part_rows:
            return [(tensor, 0, tensor.n_rows) for tensor in self.tensors]
        return [
            (tensor, i * self.part_rows, (i + 1) * self.part_rows)
            for i in range(self.n)
            for tensor in self.tensors
        ]

    def _rows(self) -> Iterable[np.ndarray | StoredRows]:
        """Return the rows for packing, which reads them where it needs them if the source can."""
        from ...cuda_kernels.packed.pack import StoredRows

        if not self.source.reads_in_place:
            return self._pieces()
        row_bytes = self.type.row_bytes(self.cols)

        def read(tensor: TensorInfo, first: int) -> Callable[[int, np.ndarray], None]:
            return lambda at, out: self.source.read_rows_into(tensor, first + at, out)

        return [
            StoredRows(last - first, row_bytes, read(tensor, first))
            for tensor, first, last in self._runs()
        ]

    def _pieces(self) -> Iterator[np.ndarray]:
        """uint8[rows, row_bytes] in the order of the packed matrix: whole row groups, at most
        `_READ_BYTES` at a time (or one group).
        """
        group = self.type.group_rows
        step = max(1, _READ_BYTES // (self.type.row_bytes(self.cols) * group)) * group
        for tensor, first, last in self._runs():
            for start in range(first, last, step):
                yield self.source.read_rows(tensor, start, min(start + step, last))


class _Blocks(WrappedSource):
    """A source of one tensor, whose rows are in memory."""

    def __init__(self, inner: Source, tensor: TensorInfo, blocks: np.ndarray):
        super().__init__(inner)
        self.tensors, self.blocks = (tensor,), blocks

    def stored(self, tensor: TensorInfo) -> TensorInfo:
        return tensor

    def read_rows(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        return self.blocks[start:stop]

    def period(self, tensor: TensorInfo) -> int:
        return tensor.n_rows


class ResidentMatrix:
    """Matrix `index` of a `Resident`."""

    stacked = ()

    def __init__(self, resident: Resident, index: int = 0):
        self.resident, self.index = resident, index
        self.rows, self.cols, self.device = resident.rows, resident.cols, resident.device

    @property
    def type(self) -> GGMLType:
        """The type that the file stores."""
        return self.resident.type

    @property
    def packed(self) -> PackedMatrix | None:
        """The packed matrix, or None if it cannot be packed."""
        return self.resident.packed

    @property
    def stored_bytes(self) -> int:
        """Bytes of the matrix as it is stored."""
        return self.resident.stored_bytes // self.resident.n

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, float32[rows, cols]) pieces that cover the matrix, decoded for this call."""
        group, first = self.resident.type.group_rows, self.index * self.rows
        step = max(1, PART_BYTES // (4 * self.cols * group)) * group
        for start in range(0, self.rows, step):
            yield start, self.resident.decode(first + start, first + min(start + step, self.rows))

    def is_few(self, n: int) -> bool:
        """Return False: see `few`."""
        return False

    def few_of_each(self, matrices: object, counts: object, x: torch.Tensor) -> None:
        """Return what `few` returns."""

    def few(self, x: torch.Tensor) -> None:
        """Products on a GPU's reference path decode the matrix first."""

    def rounded(self) -> None:
        """Products in 8 bits are for the CPU."""

    def round_rows(self, x: torch.Tensor) -> NoReturn:
        """Raise TypeError: products in 8 bits are for the CPU."""
        raise TypeError(f"a matrix on {self.device} is not multiplied in 8 bits")

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols]: the rows with these indices."""
        return self.resident.gather(rows.to(self.device) + self.index * self.rows)

"""Operands of matrix-vector products: ranges of rows, what is joined, and the checks of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import ShapeError, UnsupportedTypeError
from ...formats.types import GGMLType
from ..compile.launch import device_index
from ..layouts.table import packed_types
from ..packed.matrix import PackedMatrix
from .plan import (
    EXPERT_DOWN,
    limits,
)
from .sizes import shared_space_of


@dataclass(frozen=True)
class RowRange:
    """`rows` rows of a matrix from row `first` on."""

    matrix: PackedMatrix
    first: int
    rows: int

    @property
    def type(self) -> GGMLType:
        """Return the type of the matrix."""
        return self.matrix.type

    @property
    def device(self) -> torch.device:
        """Return the device of the matrix."""
        return self.matrix.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of these rows."""
        return self.matrix.nbytes * self.rows // self.matrix.total_rows


def supported(type: GGMLType) -> bool:
    """Return whether there are kernels for packed matrices of a type."""
    return type.name in packed_types()


def fits(m: PackedMatrix, kind: int, slots: int = 1) -> bool:
    """Return whether the device has shared memory enough for a product of one row with the matrix
    (of EXPERT_DOWN: of `slots` rows).
    """
    device = limits(device_index(m.device))
    down = kind == EXPERT_DOWN
    cut = device.plan(m.type, m.cols, slots if down else 1, kind, [m.rows] if down else [])
    return cut.shared <= shared_space_of(m.type, device.shared)


@dataclass(frozen=True)
class Join:
    """A branch of the residual stream that the next product finishes: it reads (h +
    rms_norm(delta, weight)) * scale instead of h, and writes that to `out`.

    delta and out float32[n, cols], weight float32[cols]; `out` is not h.
    """

    delta: torch.Tensor
    weight: torch.Tensor
    eps: float
    out: torch.Tensor
    scale: float = 1.0

    def rows(self, which: slice) -> Join:
        """Return the same for some of the rows."""
        return replace(self, delta=self.delta[which], out=self.out[which])


@dataclass(frozen=True)
class NextAttention:
    """The attention that reads the result: from position `full` on it has a block for every
    multiprocessor. position: int32 on the device, of the new token.
    """

    position: torch.Tensor
    full: int


def check_tensor(
    what: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise ShapeError, which names the tensor by `what`, unless it is contiguous memory of a CUDA
    device with this shape and dtype.
    """
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != shape
        or tensor.device != device
        or not tensor.is_contiguous()
        or not tensor.is_cuda
    ):
        raise ShapeError(
            f"{what}: {tensor.dtype}{list(tensor.shape)} on {tensor.device}, "
            f"expected contiguous {dtype}{list(shape)} on {device}"
        )


def check_matrix(m: PackedMatrix, cols: int, device: torch.device) -> None:
    """Raise ShapeError if the rows of a matrix are not for activations of `cols` elements on the
    device, UnsupportedTypeError if its type has no kernel.
    """
    if m.cols != cols or m.device != device:
        raise ShapeError(
            f"a matrix with rows of {m.cols} elements on {m.device} for activations of {cols} on"
            f" {device}"
        )
    if not supported(m.type):
        raise UnsupportedTypeError(f"there is no matrix-vector kernel for {m.type}")

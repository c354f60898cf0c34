"""Present tensors that a checkpoint stores packed as the tensors that they decode to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import CheckpointError, UnsupportedTypeError
from ...formats.source import TensorInfo
from ...formats.tensor_names import TensorName
from ...formats.types import TYPES, GGMLType
from .stored import FLOAT_DTYPES, WIDENED_DTYPES, StoredTensor, TensorRows


@dataclass(frozen=True)
class Factor:
    """One number per matrix that a block type cannot hold. `values()` reads float32[count]; a count
    of 1 applies to all matrices.
    """

    count: int
    values: Callable[[], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class DecodedTensor(StoredTensor):
    """`rows` returns the tensor as `type`. `shape` is the logical shape; file and positions are
    those of the packed codes.

    `factors` become tensors of the output: `scale`, by which the values are still to be multiplied,
    and `input_scale`.
    """

    type: GGMLType
    rows: TensorRows
    factors: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return self.type.tensor_bytes(self.shape)


def ggml_type_of(tensor: StoredTensor) -> GGMLType:
    """Return the ggml type that rows of a stored or decoded tensor are read as; F32 for wider
    floats and integers. Raise UnsupportedTypeError for other dtypes.
    """
    if isinstance(tensor, DecodedTensor):
        return tensor.type
    if found := FLOAT_DTYPES.get(tensor.dtype):
        return found
    if tensor.dtype in WIDENED_DTYPES:
        return TYPES["F32"]
    raise UnsupportedTypeError(
        f"dtype {tensor.dtype} is not supported; F32, F16, BF16, F64 and integers of 16 bits or"
        " more are",
        file=tensor.file,
        tensor=tensor.name,
    )


def decoded(
    packed: StoredTensor,
    name: str,
    shape: tuple[int, ...],
    type: GGMLType,
    rows: TensorRows,
    factors: Mapping[str, Factor] | None = None,
) -> DecodedTensor:
    """Return the tensor that `packed` decodes to. rows: of `type`, computed when they are read;
    factors: see `DecodedTensor`.
    """
    return DecodedTensor(
        name,
        type.name,
        shape,
        packed.file,
        packed.begin,
        packed.end,
        type=type,
        rows=rows,
        factors=factors or {},
    )


class FactorRow:
    """The factors of the tensors that one output tensor is made of, as a single float32 row that is
    read on demand.
    """

    def __init__(self, factors: Sequence[Factor], count: int):
        self.n_rows, self.row_bytes = 1, 4 * count
        self._factors, self._count = factors, count

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.concatenate([factor.values() for factor in self._factors])
        if len(values) == 1:
            values = np.repeat(values, self._count)
        return (
            np.ascontiguousarray(values, np.float32)
            .view(np.uint8)
            .reshape(1, self.row_bytes)[start:stop]
        )

    def release(self) -> None:
        pass


def factor_tensors(
    info: TensorInfo, made_of: Sequence[StoredTensor]
) -> list[tuple[TensorInfo, FactorRow]]:
    """Return the tensors that accompany `info`, which is made of these stored tensors matrix by
    matrix: `NAME.scale` with one number per matrix.

    Raise CheckpointError if only some of the stored tensors have factors, or the output tensor has
    no place for them.
    """
    found = [tensor.factors if isinstance(tensor, DecodedTensor) else {} for tensor in made_of]
    names = found[0] if found else {}
    if info.type == TYPES["NVFP4"] and (
        not found or any("scale" not in factors for factors in found)
    ):
        raise CheckpointError(
            f"{info.type.name} codes with one factor per matrix cannot be rearranged into"
            f" '{info.name}'"
        )
    companions = []
    for name in names:
        factors = [tensor_factors[name] for tensor_factors in found if name in tensor_factors]
        count = sum(factor.count for factor in factors)
        if len(factors) < len(found) or (count != info.n_matrices and count != 1):
            raise CheckpointError(
                f"'{info.name}' has {info.n_matrices} matrices, but {count} factors called {name}"
                " are stored for them"
            )
        companions.append(
            (
                TensorInfo(
                    TensorName.parse(info.name).with_suffix(name), (info.n_matrices,), TYPES["F32"]
                ),
                FactorRow(factors, info.n_matrices),
            )
        )
    return companions

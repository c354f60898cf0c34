"""Matrix products with encoded weights, and embedding lookup.

Every parameter declares
- `role`: what it is to a quantization recipe (`attn_v`, `ffn_down_exps`, `output`, ...),
- `split`: how it is split among tensor-parallel ranks: `column` (each rank has output rows), `row`
  (each rank has input columns; partial results are summed), `gate_up` (output rows of two stacked
  halves, each split separately) or `replicated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from ..cuda_kernels.ops import PackedMatrix

# (tensor name, x float32[rows, n_in], expert of each row int64[rows] or None)
Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


class MatrixLike(Protocol):
    """What a product needs of a weight matrix: `weights.Matrix` or `resident.ResidentMatrix`."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Return the device on which products with it are computed."""
        ...

    @property
    def packed(self) -> PackedMatrix | None:
        """The matrix in the memory of a GPU, with all others of its tensor; None on the CPU, and if
        no kernel reads it.
        """
        ...

    def parts(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Pieces that cover the matrix: the first row and float32[rows, cols] of each."""
        ...

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[len(rows), cols]: the rows with these indices."""
        ...


class OneMatrix:
    """A parameter with one `matrix`: its device and size."""

    matrix: MatrixLike

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def rows(self) -> int:
        return self.matrix.rows

    @property
    def cols(self) -> int:
        return self.matrix.cols


class Linear(OneMatrix):
    """y = W x + b for rows x float32[rows, n_in]."""

    def __init__(
        self,
        name: str,
        matrix: MatrixLike,
        bias: torch.Tensor | None,
        observers: list[Observer],
        *,
        role: str,
        split: str,
    ):
        self.name, self.matrix, self.bias, self.role, self.split = name, matrix, bias, role, split
        self.observed = (name,)
        self._observers = observers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for observe in self._observers:
            observe(self.name, x, None)
        y = _product(self.matrix, x)
        return y if self.bias is None else y.add_(self.bias)


class ExpertLinear:
    """One matrix per expert, applied to rows that are grouped by expert.

    `observed`: the names under which observers see the products, if the matrix was merged from
    several tensors.
    """

    bias = None

    def __init__(
        self,
        name: str,
        matrices: Sequence[MatrixLike],
        observers: list[Observer],
        *,
        role: str,
        split: str,
        observed: tuple[str, ...] = (),
    ):
        self.name, self.matrices, self.role, self.split = name, matrices, role, split
        self.observed = observed or (name,)
        self._observers = observers

    @property
    def device(self) -> torch.device:
        return self.matrices[0].device

    @property
    def rows(self) -> int:
        """Rows of one expert."""
        return self.matrices[0].rows

    @property
    def cols(self) -> int:
        return self.matrices[0].cols

    @property
    def packed(self) -> PackedMatrix | None:
        """The packed matrix of all experts; None if there is none, as on the CPU."""
        whole = self.matrices[0].packed
        return whole if whole is not None and whole.n_matrices == len(self.matrices) else None

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x float32[rows, n_in]: counts[e] rows of expert e, in order of experts; returns
        float32[rows, n_out].
        """
        if self._observers:
            experts = torch.repeat_interleave(
                torch.arange(len(counts), device=x.device), counts.to(x.device)
            )
            for observe in self._observers:
                for name in self.observed:
                    observe(name, x, experts)
        y = x.new_empty(len(x), self.matrices[0].rows)
        start = 0
        for matrix, count in zip(self.matrices, counts.tolist(), strict=True):
            if count:
                y[start : start + count] = _product(matrix, x[start : start + count])
                start += count
        return y


class Embedding(OneMatrix):
    """Rows of a table; only requested rows are decoded."""

    role, split, bias = "token_embd", "replicated", None

    def __init__(self, name: str, matrix: MatrixLike):
        self.name, self.matrix = name, matrix
        self.observed = ()

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64[...] to float32[..., n_cols]."""
        return self.matrix.gather(ids.reshape(-1)).view(*ids.shape, self.matrix.cols)


def _product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    """x float32[rows, cols] times the transposed matrix, on the device of x; computed on the device
    of the matrix.
    """
    if x.device != matrix.device:
        return _product(matrix, x.to(matrix.device)).to(x.device)
    y: torch.Tensor | None = None
    for start, part in matrix.parts():
        if len(part) == matrix.rows:
            return F.linear(x, part)
        if y is None:
            y = x.new_empty(len(x), matrix.rows)
        y[:, start : start + len(part)] = F.linear(x, part)
    return x.new_empty(len(x), 0) if y is None else y

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

from .ranges import RangeName, ranged

if TYPE_CHECKING:
    from ..cuda_kernels.ops import PackedMatrix

# (tensor name, x float32[rows, n_in], expert of each row int64[rows] or None)
Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


class Taps:
    """What looks at the products of a model.

    `observers` see every product, and `readers` of them use its input (see `Model.observe`). While
    `watching`, sums of results are gathered, and `first_not_finite` tells which tensor gave the
    first one that is not finite.
    """

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.readers = 0
        self.watching = False
        self._sums: list[tuple[str, torch.Tensor]] = []

    def check(self, name: str, y: torch.Tensor) -> None:
        """Remember a result while `watching`."""
        if self.watching:
            self._sums.append((name, y.sum()))

    def first_not_finite(self) -> str | None:
        """Return the tensor whose product first gave infinity or NaN since the last call; None if
        all numbers were finite. Waits for the device once.
        """
        names = [name for name, _ in self._sums]
        sums = [total.to(torch.float32) for _, total in self._sums]
        self._sums.clear()
        if not sums:
            return None
        home = sums[-1].device
        finite = torch.stack([total.to(home) for total in sums]).isfinite().tolist()
        return None if all(finite) else names[finite.index(False)]


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
    def stored_bytes(self) -> int:
        """Return the bytes of the matrix in the file."""
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
    """y = scale * W x + b for rows x float32[rows, n_in]. `watch` gets (name, y) of every product,
    to find where numbers stop being finite.
    """

    def __init__(
        self,
        name: str,
        matrix: MatrixLike,
        bias: torch.Tensor | None,
        taps: Taps,
        *,
        role: str,
        split: str,
        scale: torch.Tensor | None = None,
    ):
        self.name, self.matrix, self.bias, self.role, self.split = name, matrix, bias, role, split
        self.scale = scale
        self.observed = (name,)
        self._taps = taps

    @property
    def range(self) -> RangeName:
        return RangeName.of_matrix(self.name, self.role, self.matrix.stored_bytes)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.observe(x)
        y = _product(self.matrix, x)
        if self.scale is not None:
            y *= self.scale
        if self.bias is not None:
            y += self.bias
        return self.check(y)

    def observe(self, x: torch.Tensor) -> None:
        """Show x to the observers of products."""
        for observe in self._taps.observers:
            observe(self.name, x, None)

    def check(self, y: torch.Tensor) -> torch.Tensor:
        """Return y, a result of this matrix, after `Taps.check` has seen it."""
        self._taps.check(self.name, y)
        return y

    def decoded(self) -> torch.Tensor:
        """Return the whole matrix W with its scale, float32[n_out, n_in]."""
        parts = [part for _, part in self.matrix.parts()]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if self.scale is None else whole * self.scale


class ManyMatrices:
    """A parameter with several `matrices` of one size: their device and size."""

    matrices: Sequence[MatrixLike]

    @property
    def device(self) -> torch.device:
        return self.matrices[0].device

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.matrices[0].rows

    @property
    def cols(self) -> int:
        return self.matrices[0].cols


class ExpertLinear(ManyMatrices):
    """One matrix per expert, applied to rows that are grouped by expert.

    `bias` float32[experts, n_out] and `scale` float32[experts] are those of each expert.
    `tensors`: the names of the tensors that hold the matrices. `observed`: the names under which
    observers see the products, if the matrix was merged from several tensors.
    """

    def __init__(
        self,
        name: str,
        matrices: Sequence[MatrixLike],
        taps: Taps,
        *,
        role: str,
        split: str,
        tensors: tuple[str, ...] = (),
        observed: tuple[str, ...] = (),
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ):
        self.name, self.matrices, self.role, self.split = name, matrices, role, split
        self.bias, self.scale = bias, scale
        self.tensors, self.observed = tensors or (name,), observed or (name,)
        self._taps = taps

    @property
    def packed(self) -> PackedMatrix | None:
        """The packed matrix of all experts; None if there is none, as on the CPU."""
        whole = self.matrices[0].packed
        return whole if whole is not None and whole.n_matrices == len(self.matrices) else None

    @property
    def range(self) -> RangeName:
        """What it reads depends on the tokens."""
        return RangeName.of_matrix(self.name, self.role)

    @ranged
    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x float32[rows, n_in]: counts[e] rows of expert e, in order of experts; returns
        float32[rows, n_out].
        """
        if self._taps.observers:
            experts = torch.repeat_interleave(
                torch.arange(len(counts), device=x.device), counts.to(x.device)
            )
            for observe in self._taps.observers:
                for name in self.observed:
                    observe(name, x, experts)
        y = x.new_empty(len(x), self.matrices[0].rows)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                rows = slice(start, start + count)
                y[rows] = _product(self.matrices[expert], x[rows])
                if self.scale is not None:
                    y[rows] *= self.scale[expert].to(y.device)
                if self.bias is not None:
                    y[rows] += self.bias[expert].to(y.device)
                start += count
        self._taps.check(self.name, y)
        return y


class HeadLinear(ManyMatrices):
    """One matrix per head: y[:, h] = W_h x[:, h], for x float32[rows, heads, n_in]."""

    bias = scale = None

    def __init__(
        self,
        name: str,
        matrices: Sequence[MatrixLike],
        taps: Taps,
        *,
        role: str,
        split: str,
    ):
        self.name, self.matrices, self.role, self.split = name, matrices, role, split
        self.observed = (name,)
        self._taps = taps

    @property
    def range(self) -> RangeName:
        n_bytes = sum(matrix.stored_bytes for matrix in self.matrices)
        return RangeName.of_matrix(self.name, self.role, n_bytes)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[rows, heads, n_in] to float32[rows, heads, n_out]. Observers see the rows head
        after head, with the head in place of the expert.
        """
        if self._taps.observers:
            n_heads = len(self.matrices)
            heads = torch.arange(n_heads, device=x.device).repeat_interleave(len(x))
            by_head = x.transpose(0, 1).flatten(0, 1)
            for observe in self._taps.observers:
                observe(self.name, by_head, heads)
        return self._stacked(_product(m, x[:, h]) for h, m in enumerate(self.matrices))

    def of_one(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return W_h x of some heads, float32[rows, heads, n_out] for one x float32[rows, n_in].
        Observers do not see it.
        """
        return self._stacked(_product(matrix, x) for matrix in self.matrices[heads])

    def transposed(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return W_h^T x of some heads, float32[rows, heads, n_in] for one x float32[rows, n_out].
        Observers do not see it.
        """
        return self._stacked(_transposed_product(matrix, x) for matrix in self.matrices[heads])

    @property
    def is_read(self) -> bool:
        """Return whether an observer uses the inputs of products."""
        return self._taps.readers > 0

    def _stacked(self, products: Iterable[torch.Tensor]) -> torch.Tensor:
        y = torch.stack(list(products), dim=1)
        self._taps.check(self.name, y)
        return y


class Embedding(OneMatrix):
    """Rows of a table; only requested rows are decoded."""

    role, split = "token_embd", "replicated"
    bias = scale = None

    def __init__(self, name: str, matrix: MatrixLike, taps: Taps):
        self.name, self.matrix = name, matrix
        self.observed = ()
        self._taps = taps

    @property
    def range(self) -> RangeName:
        """What it reads depends on the tokens."""
        return RangeName.of_matrix(self.name, self.role)

    @ranged
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64[...] to float32[..., n_cols]."""
        y = self.matrix.gather(ids.reshape(-1))
        self._taps.check(self.name, y)
        return y.view(*ids.shape, self.matrix.cols)


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


def _transposed_product(matrix: MatrixLike, x: torch.Tensor) -> torch.Tensor:
    """x float32[rows, matrix.rows] times the matrix, on the device of x."""
    if x.device != matrix.device:
        return _transposed_product(matrix, x.to(matrix.device)).to(x.device)
    y = x.new_zeros(len(x), matrix.cols)
    for start, part in matrix.parts():
        y += x[:, start : start + len(part)] @ part
    return y

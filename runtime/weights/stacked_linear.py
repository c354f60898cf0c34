"""Products with one matrix per expert, or per head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .matrix import MatrixLike, grouped_products, product, transposed_product
from .ranges import RangeName, ranged
from .taps import Taps

if TYPE_CHECKING:
    from ...cuda_kernels.packed.matrix import PackedMatrix
    from .rounded import Rounded


class ManyMatrices:
    """A parameter with several `matrices` of one size: their device and size. together: observers
    do not see which matrix an input is for.
    """

    matrices: Sequence[MatrixLike]
    role: str
    together: bool = False

    @property
    def device(self) -> torch.device:
        """Where products are computed."""
        return self.matrices[0].device

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all matrices in the file."""
        return sum(matrix.stored_bytes for matrix in self.matrices)

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.matrices[0].rows

    @property
    def cols(self) -> int:
        """Elements of the input."""
        return self.matrices[0].cols


class ExpertLinear(ManyMatrices):
    """One matrix per expert, applied to rows that are grouped by expert.

    `bias` float32[experts, n_out] and `scale` float32[experts] are those of each expert, on the
    device of the matrices.
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
        # Where the products are: while a step waits for experts on the CPU, nothing can be copied.
        self.bias, self.scale = (x if x is None else x.to(self.device) for x in (bias, scale))
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
        each = counts.tolist()
        return self._finished(*grouped_products(self.matrices, x, each), each)

    def multiplies_rounded(self, counts: Sequence[int]) -> bool:
        """Return whether `of_rounded` takes counts[e] rows of expert e: they are many, and no
        observer wants to see them.
        """
        used = [(m, n) for m, n in zip(self.matrices, counts, strict=True) if n]
        if self._taps.observers or not used or any(m.stacked or m.is_few(n) for m, n in used):
            return False
        return used[0][0].rounded() is not None

    @ranged
    def of_rounded(self, rows: Rounded, counts: Sequence[int]) -> torch.Tensor:
        """Return what a call does, for rows in 8 bits."""
        panels, start = list[tuple[torch.Tensor, int, int]](), 0
        for matrix, n in zip(self.matrices, counts, strict=True):
            if n and (memory := matrix.rounded()) is not None:
                panels.append((memory, start, n))
            start += n
        return self._finished(*rows.products(panels, self.rows), counts)

    def _finished(self, y: torch.Tensor, proof: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
        """Return products y, of each[e] rows of expert e, with what is multiplied and added after
        them.
        """
        start = 0
        for expert, count in enumerate(
            each if self.scale is not None or self.bias is not None else ()
        ):
            rows = slice(start, start + count)
            if self.scale is not None:
                y[rows] *= self.scale[expert].to(y.device)
            if self.bias is not None:
                y[rows] += self.bias[expert].to(y.device)
            start += count
        self._taps.check(self.name, proof, stays=proof is not y)
        return y


class HeadLinear(ManyMatrices):
    """One matrix per head: y[:, h] = W_h x[:, h], for x float32[rows, heads, n_in]. together: the
    file has them as one matrix, so that observers see no heads.
    """

    bias = scale = None

    def __init__(
        self,
        name: str,
        matrices: Sequence[MatrixLike],
        taps: Taps,
        *,
        role: str,
        split: str,
        together: bool = False,
    ):
        self.name, self.matrices, self.role, self.split = name, matrices, role, split
        self.observed, self.together = (name,), together
        self._taps = taps

    @property
    def range(self) -> RangeName:
        """The name of its range in profiles, with the bytes that it reads."""
        n_bytes = sum(matrix.stored_bytes for matrix in self.matrices)
        return RangeName.of_matrix(self.name, self.role, n_bytes)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32[rows, heads, n_in] to float32[rows, heads, n_out]. Observers see the rows head
        after head, with the head in place of the expert unless they are `together`.
        """
        n_heads, by_head = len(self.matrices), x.transpose(0, 1).flatten(0, 1)
        if self._taps.observers:
            heads = torch.arange(n_heads, device=x.device).repeat_interleave(len(x))
            for observe in self._taps.observers:
                observe(self.name, by_head, None if self.together else heads)
        y, proof = grouped_products(self.matrices, by_head, [len(x)] * n_heads)
        self._taps.check(self.name, proof, stays=proof is not y)
        return y.unflatten(0, (n_heads, len(x))).transpose(0, 1)

    def of_one(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return W_h x of some heads, float32[rows, heads, n_out] for one x float32[rows, n_in].
        Observers do not see it.
        """
        return self._stacked(product(matrix, x) for matrix in self.matrices[heads])

    def transposed(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return W_h^T x of some heads, float32[rows, heads, n_in] for one x float32[rows, n_out].
        Observers do not see it.
        """
        return self._stacked(transposed_product(matrix, x) for matrix in self.matrices[heads])

    @property
    def is_read(self) -> bool:
        """Return whether an observer uses the inputs of products."""
        return self._taps.readers > 0

    def _stacked(self, products: Iterable[torch.Tensor]) -> torch.Tensor:
        y = torch.stack(list(products), dim=1)
        self._taps.check(self.name, y)
        return y

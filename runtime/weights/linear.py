"""Matrix products with encoded weights, and embedding lookup.

Every parameter declares
- `role`: what it is to a quantization recipe (`attn_v`, `ffn_down_exps`, `output`, ...),
- `split`: how it is split among tensor-parallel ranks: `column` (each rank has output rows), `row`
  (each rank has input columns; partial results are summed), `gate_up` (output rows of two stacked
  halves, each split separately) or `replicated`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .matrix import MatrixLike, proven_product
from .ranges import RangeName, ranged
from .taps import Taps

if TYPE_CHECKING:
    from .rounded import Rounded


class OneMatrix:
    """A parameter with one `matrix`: its device and size."""

    matrix: MatrixLike

    @property
    def device(self) -> torch.device:
        """Where products are computed."""
        return self.matrix.device

    @property
    def rows(self) -> int:
        """Rows of the matrix: elements of the output."""
        return self.matrix.rows

    @property
    def cols(self) -> int:
        """Columns of the matrix: elements of the input."""
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
        """The name of its range in profiles, with the bytes that it reads."""
        return RangeName.of_matrix(self.name, self.role, self.matrix.stored_bytes)

    @ranged
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.observe(x)
        return self._finished(*proven_product(self.matrix, x))

    def multiplies_rounded(self, n: int) -> bool:
        """Return whether `of_rounded` takes n rows: they are many, and no observer wants to see
        them.
        """
        matrix = self.matrix
        if self._taps.observers or matrix.is_few(n):
            return False
        return matrix.rounded() is not None

    @ranged
    def of_rounded(self, rows: Rounded) -> torch.Tensor:
        """Return what a call does, for rows in 8 bits. TypeError if the matrix cannot be."""
        if (memory := self.matrix.rounded()) is None:
            raise TypeError(f"{self.name} is not multiplied in 8 bits")
        return self._finished(*rows.products([(memory, 0, rows.n)], self.rows))

    def _finished(self, y: torch.Tensor, proof: torch.Tensor) -> torch.Tensor:
        """Return a product y with what is multiplied and added after it."""
        if self.scale is not None:
            y *= self.scale
        if self.bias is not None:
            y += self.bias
        self._taps.check(self.name, proof, stays=proof is not y)
        return y

    def observe(self, x: torch.Tensor) -> None:
        """Show x, float32[rows, n_in], to the observers of products."""
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

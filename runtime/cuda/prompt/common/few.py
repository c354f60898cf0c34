"""Products of few tokens, which read packed weights."""

from __future__ import annotations

from itertools import groupby

import torch

from .....cuda_kernels.packed.matrix import PackedMatrix
from .....cuda_kernels.prompt import few
from ...common.context import Context
from .decoded import decoded, multiply


class FewTokens:
    """x W^T for matrices below each other, neighbours of one type in one launch. Those that no
    kernel reads are decoded first. part: only these rows, of one matrix. bias: half[all rows].
    """

    def __init__(
        self,
        matrices: list[PackedMatrix],
        bias: torch.Tensor | None,
        part: slice | None,
        context: Context,
    ):
        self.context, self.part = context, part
        self._launches: list[tuple[list[PackedMatrix], slice, torch.Tensor | None, bool]] = []
        begin = 0
        for _, same in groupby(matrices, key=lambda m: m.type.name):
            run = list(same)
            for at in range(0, len(run), few.MATRICES):
                some = run[at : at + few.MATRICES]
                first, last, _ = (part or slice(None)).indices(sum(m.rows for m in some))
                rows = slice(begin, begin + last - first)
                fits = few.fits(some, context.device)
                self._launches.append((some, rows, None if bias is None else bias[rows], fits))
                begin = rows.stop
        self._space = None
        if any(fits for *_, fits in self._launches):
            self._space = context.once("sums of few tokens", lambda: few.workspace(context.device))

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether x half[n, cols] is multiplied here."""
        return self._space is not None and few.takes(x)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out half[n, all rows] for x half[n, cols]."""
        assert self._space is not None
        for matrices, rows, bias, fits in self._launches:
            if fits:
                few.few_product(matrices, x, out[:, rows], self._space, bias, self.part)
            else:
                multiply(x, decoded(matrices, self.context, self.part), out[:, rows], bias)

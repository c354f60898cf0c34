"""The residual stream of a pass, with what the last branch computed and nobody has added yet.

A branch ends by handing in its result; the next norm adds it on the way, so that the stream is read
and written once per branch.
"""

from __future__ import annotations

import torch

from ...cuda_kernels import prompt
from ..layers.norm import RMSNorm
from .context import Context
from .registry import Slow


def check_norm(norm: RMSNorm, context: Context) -> None:
    """`Slow` if the stream's kernels cannot apply this norm."""
    if norm.weight.device != context.device:
        raise Slow(f"its norm is not on {context.device}")
    if not prompt.norm_fits(len(norm.weight)):
        raise Slow(f"rows of {len(norm.weight)}")


class Stream:
    """h float32[T, width]. `narrows`: behind the branch at hand only the last row of each sequence
    is needed.
    """

    def __init__(self, h: torch.Tensor, context: Context):
        self.h, self.context, self.narrows = h, context, False
        self._added: dict[str, torch.Tensor] = {}

    def normed(
        self, norm: RMSNorm, exact: torch.Tensor | None = None, permuted: bool = False
    ) -> torch.Tensor:
        """norm(h) in half (its columns `permuted` for grouped products), in float32 too where
        `exact` is given; valid until the next.
        """
        out = self.context.buffer("normed", tuple(self.h.shape), self.context.dtype)
        prompt.add_norm(
            self.h, norm.weight, norm.eps, out, exact=exact, permuted=permuted, **self._added
        )
        self._added = {}
        return out

    def add(
        self,
        delta: torch.Tensor,
        rows: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """h += delta, or the weighted rows of it as `prompt.add_norm` says; done by the next norm,
        until when these must stay.
        """
        assert not self._added  # two branches without a norm between them
        self._added = (
            {"delta": delta}
            if weights is None
            else {"delta": delta, "rows": rows, "weights": weights}
        )

    def pending(self) -> dict[str, torch.Tensor]:
        """What was handed in and not added yet, for `left`."""
        return dict(self._added)

    def left(self, pending: dict[str, torch.Tensor]) -> None:
        """As it was when `pending` was taken: the same kernels have run again, without anybody
        asking for them here.
        """
        self._added = dict(pending)

    def settled(self) -> torch.Tensor:
        """h with everything added."""
        if self._added:
            prompt.add_norm(self.h, None, 0.0, None, **self._added)
            self._added = {}
        return self.h

    def keep_last(self, n_sequences: int) -> None:
        """Leaves the last row of each of so many sequences; nothing to do where that is all there
        is.
        """
        if len(self.h) > n_sequences:
            self.h = last_rows(self.settled(), n_sequences).contiguous()


def last_rows(x: torch.Tensor, n_sequences: int) -> torch.Tensor:
    """[S * n, ...] to [S, ...]: the last row of each sequence."""
    return x.unflatten(0, (n_sequences, -1))[:, -1]

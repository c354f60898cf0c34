"""The expert that works on every row, next to experts that are chosen."""

from __future__ import annotations

import torch

from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.ffn import PlainFFN
from ...layers.moe import MoE
from ..common.context import Context
from ..common.expert_terms import gating_of, pair_of
from ..common.registry import Placed, Slow
from .common.weights import Product
from .ffn import in_place


class SharedExpert:
    """Its products with what is between them, and the vector of its gate if it has one."""

    def __init__(self, m: MoE, context: Context):
        ffn, gate = m.shared, m.shared_gate
        if ffn is None:
            raise TypeError("no expert works on every row")
        pair = [ffn.up] if isinstance(ffn, PlainFFN) else pair_of(ffn)
        share = None
        if gate is not None:
            if gate.device != context.device:
                raise Placed(f"{gate.role} is not on {context.device}")
            if gate.bias is not None:
                raise Slow(f"{gate.role} has a bias")
            share = gate.decoded().view(-1)
        self.context, self.ffn, self.gate, self.share = context, ffn, gate, share
        self.inputs = Product("shared gate_up", pair, context)
        self.down = Product("shared delta", [ffn.down], context)

    def __call__(
        self, x: torch.Tensor, exact: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return its results for half[T, width] and their shares before the sigmoid, for
        `Stream.add`. exact: the rows in float32.
        """
        gated = self._activated(self.inputs(x))
        shares = None
        if self.share is not None and self.gate is not None:
            self.context.taps.show(self.gate.observed, exact)
            shares = self.context.buffer("shares", (len(x),), torch.float32)
            torch.mv(exact, self.share, out=shares)
        return self.down(gated), shares

    def _activated(self, both: torch.Tensor) -> torch.Tensor:
        if isinstance(self.ffn, PlainFFN):
            return in_place(self.ffn.spec)(both)
        gate, up = both.chunk(2, dim=1)
        gated = self.context.buffer("shared gated", tuple(gate.shape), gate.dtype)
        prompt_rows.join_gate(gate, up, gated, gating_of(self.ffn.spec))
        return gated

"""Feed-forward layers over many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch

from ....cuda_kernels.prompt import rows as prompt_rows
from ...layers.batch import Batch
from ...layers.ffn import GatedFFN, PlainFFN
from ...layers.specs import FFNSpec
from ..common.context import Context
from ..common.expert_terms import gating_of
from ..common.registry import PROMPT, PlacedBranch, executor
from .common.graphs import Stage, Staged
from .common.stream import Stream, check_norm
from .common.weights import Product


@executor(PROMPT, GatedFFN)
class PromptFFN(Staged):
    """h += down(act(gate(x)) * up(x)), x = norm(h); gate and up in one product."""

    def __init__(self, branch: PlacedBranch, context: Context, result: str = "delta"):
        """result: the name of the buffer of what is added."""
        check_norm(branch.branch.norm, context)
        ffn: GatedFFN = branch.module
        self.branch, self.norm, self.context = branch, branch.branch.norm, context
        pair = [x for x in (ffn.gate_up, ffn.gate, ffn.up) if x is not None]
        self.gate_up = Product("gate_up", pair, context)
        self.down = Product(result, [ffn.down], context)
        self.gating, self.post_norm = gating_of(ffn.spec), branch.post_norm

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(True, self._run)]

    def _run(self, stream: Stream, batch: Batch) -> None:
        self.add(stream.normed(self.norm), stream)

    def add(self, x: torch.Tensor, stream: Stream) -> None:
        """Add the result for half[T, width], which is normed, to a stream."""
        gate, up = self.gate_up(x).chunk(2, dim=1)
        gated = self.context.buffer("gated", tuple(gate.shape), gate.dtype)
        prompt_rows.join_gate(gate, up, gated, self.gating)
        stream.add_product(self.down, gated, self.post_norm)


_IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: torch.ops.aten.silu_(x),
    "gelu": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "gelu_erf": lambda x: torch.ops.aten.gelu_(x),
    "relu_squared": lambda x: x.relu_().square_(),
}


def in_place(spec: FFNSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what replaces half[T, cols] by its activation, and returns it."""
    if (by := spec.xielu) is None:
        return _IN_PLACE[spec.activation]
    numbers = astuple(by)

    def replaced(x: torch.Tensor) -> torch.Tensor:
        prompt_rows.xielu(x, *numbers)
        return x

    return replaced


@executor(PROMPT, PlainFFN)
class PromptPlainFFN(Staged):
    """h += down(act(up(x))), x = norm(h)."""

    def __init__(self, branch: PlacedBranch, context: Context):
        check_norm(branch.norm, context)
        ffn: PlainFFN = branch.module
        self.branch, self.norm = branch, branch.norm
        self.up, self.down = Product("up", [ffn.up], context), Product("delta", [ffn.down], context)
        self.activate, self.post_norm = in_place(ffn.spec), branch.post_norm

    def stages(self, batch: Batch) -> list[tuple[bool, Stage]]:
        return [(True, self._run)]

    def _run(self, stream: Stream, batch: Batch) -> None:
        hidden = self.up(stream.normed(self.norm))
        self.activate(hidden)
        stream.add_product(self.down, hidden, self.post_norm)

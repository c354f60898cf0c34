"""The gated feed-forward layer over many rows."""

from __future__ import annotations

from ...cuda_kernels import prompt
from ..layers.batch import Batch
from ..layers.ffn import GatedFFN
from .context import Context
from .prompt_graphs import Stage, Staged
from .prompt_stream import Stream, check_norm, post_normed
from .prompt_weights import Product
from .registry import PROMPT, PlacedBranch, executor


@executor(PROMPT, GatedFFN)
class PromptFFN(Staged):
    """h += down(silu(gate(x)) * up(x)), x = norm(h); gate and up in one product."""

    def __init__(self, branch: PlacedBranch, context: Context):
        check_norm(branch.norm, context)
        ffn: GatedFFN = branch.module
        self.branch, self.norm, self.context = branch, branch.norm, context
        pair = [x for x in (ffn.gate, ffn.up) if x is not None]
        self.gate_up = Product("gate_up", pair, context)
        self.down = Product("delta", [ffn.down], context)
        self.activation, self.post_norm = ffn.spec.activation, branch.branch.post_norm

    @property
    def stages(self) -> list[tuple[bool, Stage]]:
        return [(True, self._run)]

    def _run(self, stream: Stream, batch: Batch) -> None:
        gate, up = self.gate_up(stream.normed(self.norm)).chunk(2, dim=1)
        gated = self.context.buffer("gated", tuple(gate.shape), gate.dtype)
        prompt.silu_gate(gate, up, gated, self.activation)
        stream.add(post_normed(self.down(gated), self.post_norm))

"""Many rows at once: the residual stream in float32, everything between in the context's dtype, weights decoded as they are needed."""

from __future__ import annotations

import torch

from ..layers.batch import Batch
from ..network import Network
from .context import Context
from .registry import PROMPT, Branch, branches, choose


class PromptPath:
    """The executors of a network's branches."""

    def __init__(self, network: Network, context: Context):
        self.network, self.context = network, context
        self._branches = branches(network.blocks)
        if self._branches is None:
            self._steps = [_Block(block) for block in network.blocks]
            context.report("Block", "not a mixer and a feed-forward layer one after the other", 0)
        else:
            self._steps = [choose(PROMPT, branch, context) or _Branch(branch) for branch in self._branches]

    def run(self, tokens: torch.Tensor, start: int, state=None) -> torch.Tensor:
        """The residual stream float32[S * n, width] after all blocks, of tokens int64[S, n] at positions start.. ; with a `state`
        (then S = 1) they see what is in it, and their keys and values are written into it."""
        n_sequences, n_tokens = tokens.shape
        batch = Batch(n_sequences, n_tokens, torch.arange(start, start + n_tokens, device=self.context.device))
        h = self.network.embedding(tokens.reshape(-1)).to(self.context.device)
        for step in self._steps:
            h = step(h, batch)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width] to float32[rows, vocab]."""
        return self.network.output(hidden)


class _Block:
    """A block of unknown making."""

    def __init__(self, block):
        self.block = block

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.block(h, batch)


class _Branch:
    """h += module(norm(h)) as the truth path has it."""

    def __init__(self, branch: Branch):
        self.branch = branch

    def __call__(self, h: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = self.branch.norm(h)
        return h.add_(self.branch.module(x, batch) if self.branch.is_mixer else self.branch.module(x))

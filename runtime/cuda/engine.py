"""A network on one CUDA device in bfloat16 or float16: many rows through tensor cores, few through
matrix-vector kernels.

`Model` does not use the engine while products are observed (`Model.observe`), unless the observers
take what it reads (`Model.observe_fast`).
"""

from __future__ import annotations

import torch

from ...errors import UsageError
from ..network.network import Network
from .common.context import Context
from .prompt.path import PromptPath
from .step.path import STEP_ROWS, StepPath


class Engine:
    """Runs `network`, whose weights are (mostly) on `context.device`."""

    def __init__(self, network: Network, context: Context):
        self.network, self.context = network, context
        self.prompt = PromptPath(network, context)
        self.steps = StepPath(network, context)  # 1 to STEP_ROWS tokens
        context.report_all()

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Final hidden states float32[S, n, width], normed, of independent sequences int64[S, n]
        from position `start`.
        """
        n_sequences, n_tokens = tokens.shape
        h = self.prompt.run(tokens.to(self.context.device), start)
        return self._normed(h).view(n_sequences, n_tokens, -1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width], normed, to float32[rows, vocab]."""
        return self.prompt.logits(hidden)

    @property
    def tokens_together(self) -> int:
        """Tokens of a prompt that go through the model together, as `extend` takes them."""
        return self.context.ubatch * self.prompt.most_together

    @torch.no_grad()
    def extend(self, tokens: torch.Tensor, state, all_logits: bool = False) -> torch.Tensor:
        """Appends tokens int64[n] to the sequence of `state`, `ubatch` at a time.

        Returns float32[vocab] for the last token, or float32[n, vocab]. UsageError if they do not
        fit the sequence's capacity.
        """
        n = len(tokens)
        if n == 0 or state.n_past + n > state.capacity:
            raise UsageError(
                f"{n} tokens cannot be appended to a sequence of {state.n_past} tokens with a"
                f" capacity of {state.capacity}"
            )
        if n <= STEP_ROWS:
            return self.steps.extend(tokens, state, all_logits)
        tokens = tokens.to(self.context.device)
        rows, last = [], not all_logits
        passes = self.prompt.passes(tokens)
        for number, pieces in enumerate(passes, 1):
            n_new = sum(map(len, pieces))
            state.reserve(n_new)
            if len(pieces) > 1:
                found = self.prompt.run_together(pieces, state, last=last)
            else:
                final = all_logits or number == len(passes)
                h = self.prompt.run(pieces[0][None], state.n_past, state, last=last, final=final)
                found = [h]
            state.advance(n_new)
            if all_logits:
                rows += [self.prompt.logits(self._normed(h)) for h in found]
        return torch.cat(rows) if all_logits else self.prompt.next_logits(found[-1])

    def _normed(self, h: torch.Tensor) -> torch.Tensor:
        return self.network.output_norm(h.to(self.network.output_device))

    def close(self) -> None:
        """Free what executors hold besides memory of the device."""
        self.context.close()

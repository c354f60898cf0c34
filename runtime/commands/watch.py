"""How long a slow model on the CPU will take, said while its first passes are running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...formats.commands.progress import EVERY_SECONDS, Estimate

if TYPE_CHECKING:
    import torch

    from ..model import Model

_TOKENS = 64.0  # a pass over so many tokens takes twice as long as a pass over none


def weight_of_pass(n_tokens: int) -> float:
    """Return about how long a pass takes on the CPU: weights are decoded, then multiplied."""
    return 1 + n_tokens / _TOKENS


def passes(n_tokens: int, ubatch: int) -> list[int]:
    """Return the tokens of each pass of a prompt of n_tokens."""
    return [min(ubatch, n_tokens - start) for start in range(0, n_tokens, ubatch)]


@contextmanager
def watched(
    model: Model, what: str, plan: Sequence[int], *, every: float = EVERY_SECONDS
) -> Iterator[None]:
    """Within this context, say on stderr how far a model on the CPU is after 5 seconds, then every
    minute. plan: tokens of each pass, in order.

    A GPU's passes are not watched: they are short, and watching would keep them off the fast path.
    """
    if model.device.type != "cpu":
        yield
        return
    with model.observe(_Watch(model, what, plan, every)):
        yield


class _Watch:
    def __init__(self, model: Model, what: str, plan: Sequence[int], every: float):
        self.estimate = Estimate(what, every=every)
        self.weights = [weight_of_pass(n) for n in plan]
        self.total = max(sum(self.weights), 1e-9)
        self.n_layers = max(model.hyperparameters.integer("block_count", 1), 1)
        self.first: str | None = None
        self.begun = 0  # passes

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if self.first is None:
            self.first = name
        self.begun += name == self.first
        if self.estimate.due():
            self.estimate.say(self._done(name))

    def _done(self, name: str) -> float:
        from ...formats.tensor_names import TensorName

        layer = TensorName.parse(name).layer
        within = 1.0 if layer is None else layer / self.n_layers
        now = self.begun - 1
        current = self.weights[now] if now < len(self.weights) else 0.0
        return min((sum(self.weights[:now]) + within * current) / self.total, 0.99)

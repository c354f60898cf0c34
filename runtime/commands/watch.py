"""How long a slow model on the CPU will take, said while its first passes are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...formats.commands.progress import EVERY_SECONDS, Estimate

if TYPE_CHECKING:
    import torch

    from ..model import Model

Runs = list[tuple[int, int]]  # (tokens of a pass, how many such passes), in order
_TOKENS = 64.0  # a pass over so many tokens takes twice as long as a pass over none


def weight_of_pass(n_tokens: int) -> float:
    """Return about how long a pass takes on the CPU: weights are decoded, then multiplied."""
    return 1 + n_tokens / _TOKENS


def passes(n_tokens: int, ubatch: int) -> Runs:
    """Return the passes of a prompt of n_tokens."""
    whole, rest = divmod(n_tokens, ubatch)
    return [(ubatch, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0)


@contextmanager
def watched(
    model: Model,
    what: str,
    plan: Runs,
    *,
    every: float = EVERY_SECONDS,
    before: str = "",
) -> Iterator[None]:
    """Say on stderr, within this context, how far a model on the CPU is after 5 seconds, then every
    minute, as far as its passes are those of `plan`.

    A GPU's passes are not watched: they are short, and watching would keep them off the fast path.
    """
    if model.device.type != "cpu":
        yield
        return
    watch = _Watch(model, plan, Estimate(what, every=every, before=before))
    with model.observe(watch, reads=False):
        yield


class _Watch:
    def __init__(self, model: Model, plan: Runs, estimate: Estimate):
        self.estimate = estimate
        self.runs = [(weight_of_pass(n_tokens), count) for n_tokens, count in plan]
        self.planned = sum(count for _, count in self.runs)
        self.total = max(sum(weight * count for weight, count in self.runs), 1e-9)
        self.n_layers = max(model.hyperparameters.integer("block_count", 1), 1)
        self.first: str | None = None
        self.begun = 0  # passes

    def __call__(self, name: str, x: torch.Tensor, experts: torch.Tensor | None) -> None:
        if self.first is None:
            self.first = name
            self.estimate.restart()  # what was compiled until now tells nothing about passes
        self.begun += name == self.first
        if self.begun <= self.planned and self.estimate.due() and (done := self._done(name)) > 0:
            self.estimate.say(done)

    def _done(self, name: str) -> float:
        """Return the part of the plan that is done, with the product of the matrix `name`."""
        from ...formats.tensor_names import TensorName

        layer = TensorName.parse(name).layer
        passed = self.begun - 1 + (1.0 if layer is None else layer / self.n_layers)
        done = 0.0
        for weight, count in self.runs:
            done += weight * min(passed, count)
            passed -= min(passed, count)
        return min(done / self.total, 0.99)

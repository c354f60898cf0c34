"""The samplers of a sequence in their order, with what they remember of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

from ...errors import EvaluationError, UsageError
from ..network.sampling import philox, uniform
from . import filters
from .dry import Dry
from .filters import Candidates
from .mirostat import Mirostat
from .settings import SamplerSettings


class Constraint(Protocol):
    """What a text has to look like, such as a grammar."""

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        ...

    def mask(self) -> np.ndarray:
        """Return bool[vocab]: the tokens that may come next."""
        ...

    def accept(self, token: int) -> None:
        """`token` comes next."""
        ...


class SamplerChain:
    """Draws the tokens of one sequence.

    token_bytes: the text of a token, for DRY's breakers. context: tokens that "-1" of the penalties
    means. Every token, of the prompt and drawn, has to be given to `accept`. The draw is a pure
    function of logits, history, seed and position.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        token_bytes: Callable[[int], bytes],
        context: int,
        constraint: Constraint | None = None,
    ):
        self.settings, self.context, self.constraint = settings, context, constraint
        self.history: list[int] = []
        s = settings
        self._dry = Dry(
            s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_breakers, token_bytes
        )
        self._mirostat = Mirostat(s.mirostat, s.mirostat_ent, s.mirostat_lr) if s.mirostat else None

    def check(self, n_vocab: int) -> None:
        """UsageError for a bias of a token that a vocabulary of this size does not have."""
        token = max((token for token, _ in self.settings.logit_bias), default=0)
        if token >= n_vocab:
            raise UsageError(
                f"logit bias of token {token}, but the vocabulary has {n_vocab} tokens"
            )

    def accept(self, tokens: Iterable[int]) -> None:
        """Append tokens of a prompt to the history."""
        self.history += tokens

    def sample(self, logits: torch.Tensor, position: int) -> int:
        """Return the token at `position` for logits float32[vocab] of the position before, and
        accept it. EvaluationError if they are not finite, or if no token is possible.
        """
        values = logits.cpu().numpy().astype(np.float64)
        if not np.isfinite(values.sum()):  # no sum of float32 overflows
            raise EvaluationError(f"the model's predictions for position {position} are not finite")
        self.check(len(values))
        for token, bias in self.settings.logit_bias:
            values[token] += bias
        kept = values if self.constraint is None else values.copy()
        token, probability = self._draw(Candidates.of(kept), position)
        if self.constraint is not None and not self.constraint.allows(token):
            mask = self.constraint.mask()
            n = min(len(mask), len(values))
            values[:n][~mask[:n]] = -np.inf
            values[n:] = -np.inf
            token, probability = self._draw(Candidates.of(values), position)
        if self._mirostat is not None:
            self._mirostat.update(probability)
        if self.constraint is not None:
            self.constraint.accept(token)
        self.history.append(token)
        return token

    def _draw(self, c: Candidates, position: int) -> tuple[int, float]:
        """Return a token, and its probability among those that were left."""
        if not len(c):
            raise EvaluationError(f"no token is possible at position {position}")
        s = self.settings
        if self._mirostat is not None and s.temperature > 0:
            filters.temperature(c, s.temperature)
            self._mirostat.truncate(c)
        else:
            for name in s.order:
                if s.has_effect(name):
                    self._apply(name, c, position)
        c.sort()
        weights = np.exp(c.logits - c.logits[0])
        sums = weights.cumsum()
        drawn = int((sums <= uniform(s.seed, position) * sums[-1]).sum())
        drawn = min(drawn, len(c) - 1)
        return int(c.ids[drawn]), float(weights[drawn] / sums[-1])

    def _apply(self, name: str, c: Candidates, position: int) -> None:
        s = self.settings
        if name == "penalties":
            last = self._last(s.repeat_last_n)
            filters.penalize(c, last, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
        elif name == "dry":
            self._dry(c, self._last(s.dry_penalty_last_n))
        elif name == "top_n_sigma":
            filters.top_n_sigma(c, s.top_n_sigma)
        elif name == "top_k":
            filters.top_k(c, s.top_k)
        elif name == "typ_p":
            filters.typical(c, s.typical_p)
        elif name == "top_p":
            filters.top_p(c, s.top_p)
        elif name == "min_p":
            filters.min_p(c, s.min_p)
        elif name == "xtc":
            chance = _second_uniform(s.seed, position)
            filters.xtc(c, s.xtc_probability, s.xtc_threshold, chance)
        elif name == "temperature":
            filters.temperature(c, s.temperature, s.dynatemp_range, s.dynatemp_exponent)

    def _last(self, n: int) -> list[int]:
        """Return the last n tokens; -1: as many as the context has."""
        n = self.context if n < 0 else n
        return self.history[-n:] if n > 0 else []


def _second_uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is independent of `uniform`: the second word of its block."""
    mask = 0xFFFFFFFF
    counter = (position & mask, position >> 32, 0, 0)
    word = philox(counter, (seed & mask, seed >> 32))[1]
    return (word >> 8) * 2.0**-24

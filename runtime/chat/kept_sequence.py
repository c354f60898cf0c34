"""A sequence that keeps what the next prompt may begin with."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UsageError
from ..model import Model
from ..state.sequence import Snapshot
from ..tokens import n_common


class KeptSequence:
    """One sequence of `model`, and the `tokens` that its `state` has, at most `context`.

    A prompt is evaluated from where it differs from them. Where the state cannot simply be cut back
    to there, as recurrent states and windows cannot, it goes back to its last snapshot.
    """

    def __init__(self, model: Model, context: int):
        self.model, self.state = model, model.new_state(context)
        self.tokens: list[int] = []
        self._snapshot: Snapshot | None = None

    def clear(self) -> None:
        """Forget all tokens."""
        self.state.clear()
        self.tokens, self._snapshot = [], None

    def holds(self, tokens: list[int]) -> None:
        """Say that the sequence is the first of these tokens, as many as it has."""
        known = tokens[: self.state.n_past]
        self.tokens = known if len(known) == self.state.n_past else []

    def reuse(self, tokens: list[int]) -> int:
        """Cut the sequence back to what it has in common with `tokens`; return how much that is. At
        least one token stays to be evaluated.
        """
        common = min(n_common(self.tokens, tokens), len(tokens) - 1)
        if len(self.tokens) != self.state.n_past:  # an error has come between
            self.clear()
            return 0
        try:
            self.state.truncate(common)
        except UsageError:  # a recurrent state, or a window that has moved on
            snapshot = self._snapshot
            if snapshot is None or snapshot.n_past > common:
                self.clear()
                return 0
            self.state.restore(snapshot)
        self.tokens = self.tokens[: self.state.n_past]
        return self.state.n_past

    def evaluate(self, tokens: list[int], stable: int, interrupted: Callable[[], bool]) -> bool:
        """Evaluate all pieces of a long prompt but the last; False if that was interrupted. After
        `stable` tokens, if that is not 0, a snapshot is taken.
        """
        most = self.model.tokens_together
        while True:
            done = self.state.n_past
            stop = stable if done < stable else len(tokens) - 1
            stop = min(stop, done + most)
            if stop <= done or (done >= stable and len(tokens) - done <= most):
                return True
            if interrupted():
                return False
            self.model.extend(tokens[done:stop], self.state)
            self.tokens = tokens[: self.state.n_past]
            if stop == stable:
                self._snapshot = self.state.snapshot()

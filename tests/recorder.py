"""A model that records which tokens it is given, and after which."""

from __future__ import annotations

import torch
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.model import Model


class Recorder:
    """A model that records its calls."""

    def __init__(self, spec: str = "llama-tiny:Q8_0"):
        self.model, self.calls, self.capacities = (
            Model(SyntheticSource(spec), torch.device("cpu")),
            [],
            [],
        )
        self.extend_inner, self.new_state_inner = self.model.extend, self.model.new_state
        self.model.extend, self.model.new_state = self.extend, self.new_state
        self.after_inner, self.model._after = self.model._after, self.after

    def after(self, token, state):
        self.calls.append((state.n_past, 1))
        return self.after_inner(token, state)

    def extend(self, tokens, state, **options):
        self.calls.append((state.n_past, len(tokens)))
        return self.extend_inner(tokens, state, **options)

    def new_state(self, capacity, settings=None):
        self.capacities.append(capacity)
        return self.new_state_inner(capacity, settings)

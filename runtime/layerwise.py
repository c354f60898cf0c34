"""Evaluate independent sequences layer by layer instead of pass by pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .layers.attention import Attention
from .layers.batch import Batch
from .layers.mla import MLA
from .model import Model


@dataclass
class LayerPass:
    """Sequences int64[S, n] that go through the layers together, and what layers leave for later
    ones. The caller keeps the states.
    """

    tokens: torch.Tensor
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Tokens of the pass."""
        return self.tokens.numel()


def layers_are_separate(model: Model) -> bool:
    """Return whether a layer reads nothing of earlier ones but its states. On the fast path what
    layers leave for later ones is valid within a pass alone.
    """
    if model.network.n_streams > 1:
        return False
    for block in model.network.blocks:
        mixer = block.mixer
        if isinstance(mixer, MLA) and mixer.top_k:
            return False
        if isinstance(mixer, Attention) and (
            mixer.spec.kv_shared or mixer.spec.kv_from is not None
        ):
            return False
    return True


def first_states(model: Model, one: LayerPass) -> torch.Tensor:
    """Return what the first layer reads, float32[rows, width]."""
    return model.first_states(one.tokens.reshape(-1))


def after_layer(model: Model, layer: int, one: LayerPass, h: torch.Tensor) -> torch.Tensor:
    """Return what comes out of a layer for the states h float32[rows, width] that it reads, and may
    change. Observers of the model see its products.
    """
    n_sequences, n_tokens = one.tokens.shape
    batch = Batch.of(n_sequences, n_tokens, 0, model.device, model.cache)
    batch.scratch.update(one.scratch)
    made = model.after_layer(layer, one.tokens.reshape(-1), h, batch)
    one.scratch = batch.scratch
    return made

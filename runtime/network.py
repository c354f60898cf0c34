"""The network that an architecture file builds: embedding, blocks, final norm and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layers.batch import Batch
from .layers.block import Block
from .layers.norm import RMSNorm
from .linear import Embedding, Linear
from .state.cache import CacheSettings, State


@dataclass(frozen=True)
class Network:
    """Embedding, blocks, final norm and output projection.

    Blocks can be of different kinds.
    """

    embedding: Embedding
    blocks: Sequence[Block]
    output_norm: RMSNorm
    output: Linear
    n_vocab: int

    @property
    def output_device(self) -> torch.device:
        """The device of final hidden states and logits: that of the final norm, whatever the device
        of the output matrix.
        """
        return self.output_norm.weight.device

    def new_state(self, capacity: int, settings: CacheSettings) -> State:
        """Return an empty sequence of at most `capacity` tokens."""
        return State(
            capacity, [block.new_state(capacity, settings) for block in self.blocks], settings
        )

    def hidden(
        self, tokens: torch.Tensor, batch: Batch, state: State | None = None
    ) -> torch.Tensor:
        """Return final hidden states float32[rows, width], normed, for tokens int64[rows] as
        `batch` says, and append them to `state`.
        """
        h = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            h = block(
                h.to(block.device),
                batch.at(None if state is None else state.layers[i], block.device),
            )
        if state is not None:
            state.n_past += batch.n_tokens
        return self.output_norm(h.to(self.output_device))

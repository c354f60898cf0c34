"""The network that an architecture file builds: embedding, blocks, final norm and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cache import CacheSettings, State
from .layers.batch import Batch
from .layers.block import Block
from .layers.norm import RMSNorm
from .linear import Embedding, Linear


@dataclass(frozen=True)
class Network:
    """Embedding, blocks, final norm and output projection.

    Blocks need not be alike. A block is called as block(h, batch), has the `device` it works on,
    and `new_state(capacity, settings)`.
    """

    embedding: Embedding
    blocks: Sequence[Block]
    output_norm: RMSNorm
    output: Linear
    n_vocab: int

    @property
    def output_device(self) -> torch.device:
        """Where final hidden states and logits are: with the final norm, wherever the output matrix
        lies.
        """
        return self.output_norm.weight.device

    def new_state(self, capacity: int, settings: CacheSettings) -> State:
        """An empty sequence of at most `capacity` tokens."""
        return State(
            capacity, [block.new_state(capacity, settings) for block in self.blocks], settings
        )

    def hidden(
        self, tokens: torch.Tensor, batch: Batch, state: State | None = None
    ) -> torch.Tensor:
        """Final hidden states float32[rows, width], normed, of the rows of `batch`: tokens
        int64[rows]. `state` takes them in.
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

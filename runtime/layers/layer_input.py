"""What layers read of the tokens themselves: rows of a table, which a branch of each layer reads,
and numbers of experts.
"""

from __future__ import annotations

from typing import Any

import torch

from ..weights.linear import Embedding, Linear
from ..weights.ranges import opened
from .batch import Batch
from .ffn import activate
from .moe import MoE
from .norm import RMSNorm
from .specs import FFNSpec


class LayerInputs:
    """Vectors of `length` elements for every layer, float32[rows, layers, length], from token ids
    and their embeddings h: (norm(projection h / sqrt(width)) + sqrt(length) * table[token]) /
    sqrt(2).
    """

    def __init__(self, table: Embedding, projection: Linear, norm: RMSNorm):
        self.table, self.projection, self.norm = table, projection, norm
        self.length = norm.weight.numel()

    def __call__(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = h.to(self.norm.weight.device)  # that of the embedding; layers move what they read
        return self.joined(tokens, self.projection(h))

    def joined(self, tokens: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Return the vectors, from the products of the embeddings, float32[rows, layers *
        length].
        """
        width = self.projection.cols
        projected = (projected / width**0.5).unflatten(-1, (-1, self.length))
        looked_up = self.table(tokens).to(projected.device).view(projected.shape)
        return (self.norm(projected) + self.length**0.5 * looked_up) * 0.5**0.5


class LayerInput:
    """projection(activation(gate h) * inputs of the layer)."""

    experts_used, expert_share = 1, 1.0

    def __init__(self, gate: Linear, projection: Linear, spec: FFNSpec):
        self.gate, self.projection, self.spec = gate, projection, spec

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if batch.inputs is None:
            raise TypeError("the batch has no inputs for layers")
        inputs = batch.inputs[:, batch.layer].to(x.device)
        return self.projection(activate(self.spec, self.gate(x)) * inputs)


class TokenIds:
    """What layers need of tokens that choose experts: the tokens, int64[rows]."""

    def __call__(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return tokens


class TokenMoE(MoE):
    """The sum of the experts that `table`, int64[vocabulary, n_used], has for a token. Their
    weights are scores of the hidden state, as where these choose. All of them are used: smart
    expert reduction changes nothing.
    """

    def __init__(self, table: torch.Tensor, *arguments: Any):
        super().__init__(*arguments)
        self.table = table

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  branches say which is called
        self, x: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """x float32[rows, width] to float32[rows, width], rows as `batch` says. Raise TypeError for
        a batch that does not know its tokens.
        """
        if batch.inputs is None:
            raise TypeError("the batch has no tokens for layers")
        tokens = batch.inputs.to(self.table.device)
        chosen = self.table[tokens].to(x.device)
        with opened("", type(self.router).__name__):
            weights = self.router.weights_of(self.router.linear(x), chosen)
        return self.of_chosen(x, chosen, weights)

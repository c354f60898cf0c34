"""What models in plain torch share, which stand for classes that transformers does not have.

They have the interface that tests use of transformers' classes, and store tensors under the names
of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Norm(nn.Module):
    """Divide by the root mean square of the last dimension, and multiply by the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class FeedForward(nn.Module):
    """down(silu(gate x) * up x). names: those of gate, up and down."""

    def __init__(self, width: int, hidden: int, names=("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self._names = names
        for name, sizes in zip(names, ((width, hidden), (width, hidden), (hidden, width))):
            setattr(self, name, nn.Linear(*sizes, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self._names)
        y = gate(x)
        return down(y * y.sigmoid() * up(x))


class Body(nn.Module):
    """Embedding, whose name is given, layers and last norm."""

    def __init__(
        self, name: str, embedding: nn.Embedding, layers: Iterable[nn.Module], norm: nn.Module
    ):
        super().__init__()
        self._embedding = name
        setattr(self, name, embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self._embedding)(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CausalModel(PreTrainedModel):
    """Logits [1, n, vocabulary] of one sequence of token ids [1, n].

    layer: makes a layer of a config and its number; norm: the last norm of its size and epsilon.
    embedding, head: names of the first and the last matrix.
    """

    layer: ClassVar[Any]
    norm: ClassVar[Any] = Norm
    embedding, head = "embed_tokens", "lm_head"

    def __init__(self, config: PretrainedConfig):
        super().__init__(config)
        layers = (self.layer(config, number) for number in range(config.num_hidden_layers))
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        norm = self.norm(config.hidden_size, config.rms_norm_eps)
        self.model = Body(self.embedding, embedding, layers, norm)
        setattr(self, self.head, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=getattr(self, self.head)(self.model(input_ids[0]))[None])

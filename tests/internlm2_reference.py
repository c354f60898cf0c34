"""InternLM2 in plain torch, written from its equations: transformers has no class of it.

`InternLM2ForCausalLM` has the interface that tests use of transformers' classes, and stores tensors
under the names of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .plain_models import CausalModel, FeedForward, Norm


class InternLM2Config(PretrainedConfig):
    """The keys of a published config.json, which are all given. scaling: `rope_scaling`, of which
    `linear` is evaluated, and `dynamic` changes nothing within the context.
    """

    model_type = "internlm2"

    def __init__(self, **keys: Any):
        super().__init__(tie_word_embeddings=keys.pop("tie_word_embeddings", False))
        self.scaling = keys.pop("rope_scaling", None)  # transformers would put it elsewhere
        for key, value in keys.items():
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        keys = super().to_dict()
        return keys | {"rope_scaling": keys.pop("scaling")}


class Heads(nn.Module):
    """Causal attention of tokens [n, width]. One product gives, for each head of keys, its queries,
    its keys and its values.
    """

    def __init__(self, c: InternLM2Config):
        super().__init__()
        self.c, self.size = c, c.hidden_size // c.num_attention_heads
        both = c.num_attention_heads + 2 * c.num_key_value_heads
        self.wqkv = nn.Linear(c.hidden_size, both * self.size, bias=False)
        self.wo = nn.Linear(c.num_attention_heads * self.size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, group = len(x), self.c.num_attention_heads // self.c.num_key_value_heads
        heads = self.wqkv(x).view(n, self.c.num_key_value_heads, group + 2, self.size)
        mixed = []
        for of_key in heads.unbind(1):
            *queries, k, v = of_key.unbind(1)
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            k = self.rotated(k)
            for q in queries:
                scores = self.rotated(q) @ k.T / self.size**0.5
                mixed.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
        return self.wo(torch.cat(mixed, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs half of a head apart as complex numbers, by double angles."""
        scaling = self.c.scaling or {}
        divisor = scaling["factor"] if scaling.get("type") == "linear" else 1.0
        exponents = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        positions = torch.arange(len(x)).double() / divisor
        angles = torch.outer(positions, self.c.rope_theta**-exponents)
        turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat([turned.real, turned.imag], -1).float()


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x))."""

    def __init__(self, c: InternLM2Config, number: int):
        super().__init__()
        self.attention = Heads(c)
        self.feed_forward = FeedForward(c.hidden_size, c.intermediate_size, ("w1", "w3", "w2"))
        self.attention_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class InternLM2ForCausalLM(CausalModel):
    """Logits [1, n, vocabulary] of one sequence of token ids [1, n]."""

    config_class, layer = InternLM2Config, Layer
    embedding, head = "tok_embeddings", "output"

"""DeepSeekMoE in plain torch, written from its equations (Dai et al., 2024): transformers has no
class of it.

`DeepseekForCausalLM` has the interface that tests use of transformers' classes, and stores tensors
under the names of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .plain_models import CausalModel, FeedForward, Norm


class DeepseekConfig(PretrainedConfig):
    """The keys of a published config.json, which are all given."""

    model_type = "deepseek"

    def __init__(self, **keys: Any):
        super().__init__(tie_word_embeddings=keys.pop("tie_word_embeddings", False))
        for key, value in keys.items():
            setattr(self, key, value)


class Mixture(nn.Module):
    """Each token takes the experts with the best shares of a softmax, weighed by these shares."""

    def __init__(self, c: DeepseekConfig):
        super().__init__()
        d, hidden = c.hidden_size, c.moe_intermediate_size
        self.n_used = c.num_experts_per_tok
        self.gate = nn.Linear(d, c.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(d, hidden) for _ in range(c.n_routed_experts))
        self.shared_experts = FeedForward(d, hidden * c.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        least = shares.sort(-1, descending=True).values[:, self.n_used - 1 : self.n_used]
        shares = shares.masked_fill(shares < least, 0.0)
        every = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (shares[..., None] * every).sum(1) + self.shared_experts(x)


class Heads(nn.Module):
    """Causal attention of tokens [n, width]."""

    def __init__(self, c: DeepseekConfig):
        super().__init__()
        self.c, self.size = c, c.hidden_size // c.num_attention_heads
        d, kv = c.hidden_size, c.num_key_value_heads * self.size
        self.q_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, kv, bias=False), nn.Linear(d, kv, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, group = len(x), self.c.num_attention_heads // self.c.num_key_value_heads
        q, k, v = (
            product(x).view(n, -1, self.size).transpose(0, 1)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = self.rotated(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = self.rotated(q) @ k.transpose(1, 2) / self.size**0.5
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(0, 1).reshape(n, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs half of a head apart as complex numbers, by double angles."""
        exponents = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        angles = torch.outer(torch.arange(x.shape[1]).double(), self.c.rope_theta**-exponents)
        turns = torch.polar(torch.ones_like(angles), angles)
        turned = torch.complex(*x.double().chunk(2, -1)) * turns
        return torch.cat([turned.real, turned.imag], -1).float()


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x))."""

    def __init__(self, c: DeepseekConfig, number: int):
        super().__init__()
        dense = number < c.first_k_dense_replace
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Heads(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size) if dense else Mixture(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekForCausalLM(CausalModel):
    """Logits [1, n, vocabulary] of one sequence of token ids [1, n]."""

    config_class, layer = DeepseekConfig, Layer

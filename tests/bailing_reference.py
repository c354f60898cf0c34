"""Ling 2.0 in plain torch, written from its equations: transformers has no class of it.

`BailingMoeV2ForCausalLM` has the interface that tests use of transformers' classes, and stores
tensors under the names of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .plain_models import CausalModel, FeedForward, Norm


class BailingMoeV2Config(PretrainedConfig):
    """The keys of a published config.json, which are all given."""

    model_type = "bailing_moe_v2"

    def __init__(self, **keys: Any):
        keys.setdefault("tie_word_embeddings", False)
        super().__init__(**keys)
        for key, value in keys.items():
            setattr(self, key, value)


class Gate(nn.Module):
    """The weights of all experts for tokens [n, width]: [n, experts], 0 for those not chosen."""

    def __init__(self, c: BailingMoeV2Config):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.zeros(c.num_experts, c.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, weights = self.c, torch.zeros(len(x), self.c.num_experts)
        scores = (x @ self.weight.T).sigmoid()
        for token, (own, biased) in enumerate(zip(scores, scores + self.expert_bias)):
            groups = biased.view(c.n_group, -1)
            best = groups.sort(descending=True).values[:, :2].sum(1)
            outside = torch.ones(c.n_group, dtype=torch.bool)
            outside[best.argsort(descending=True)[: c.topk_group]] = False
            allowed = groups.masked_fill(outside[:, None], -torch.inf).flatten()
            chosen = allowed.argsort(descending=True)[: c.num_experts_per_tok]
            share = own[chosen] / own[chosen].sum() if c.norm_topk_prob else own[chosen]
            weights[token, chosen] = share * c.routed_scaling_factor
        return weights


class Mixture(nn.Module):
    """Chosen experts, and one that works on every token."""

    def __init__(self, c: BailingMoeV2Config):
        super().__init__()
        hidden = c.moe_intermediate_size
        self.gate = Gate(c)
        self.experts = nn.ModuleList(
            FeedForward(c.hidden_size, hidden) for _ in range(c.num_experts)
        )
        self.shared_experts = FeedForward(c.hidden_size, hidden * c.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (self.gate(x)[..., None] * every).sum(1) + self.shared_experts(x)


class Heads(nn.Module):
    """Causal attention of tokens [n, width]. Normed heads are rotated by their positions."""

    def __init__(self, c: BailingMoeV2Config):
        super().__init__()
        self.c, both = c, c.num_attention_heads + 2 * c.num_key_value_heads
        self.query_key_value = nn.Linear(c.hidden_size, both * c.head_dim, bias=False)
        self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.dense = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, n = self.c, len(x)
        heads = self.query_key_value(x).view(n, -1, c.head_dim).transpose(0, 1)
        q, k, v = heads.split([c.num_attention_heads, *[c.num_key_value_heads] * 2])
        q, k = self.rotated(self.query_layernorm(q)), self.rotated(self.key_layernorm(k))
        group = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) / c.head_dim**0.5).masked_fill(later, -torch.inf)
        return self.dense((scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs half of the rotated elements apart as complex numbers, by double angles."""
        n_rot = int(self.c.head_dim * self.c.partial_rotary_factor)
        exponents = torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot
        angles = torch.outer(torch.arange(x.shape[1]).double(), self.c.rope_theta**-exponents)
        a, b, rest = x.double().split([n_rot // 2, n_rot // 2, self.c.head_dim - n_rot], -1)
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, rest], -1).float()


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x))."""

    def __init__(self, c: BailingMoeV2Config, number: int):
        super().__init__()
        dense = number < c.first_k_dense_replace
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.attention = Heads(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = FeedForward(c.hidden_size, c.intermediate_size) if dense else Mixture(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class BailingMoeV2ForCausalLM(CausalModel):
    """Logits [1, n, vocabulary] of one sequence of token ids [1, n]."""

    config_class, layer = BailingMoeV2Config, Layer
    embedding = "word_embeddings"

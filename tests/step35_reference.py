"""Step 3.5 in plain torch, written from its equations: transformers has no class of it that stands
alone. A test compares this one with the text part of its Step 3.7.

`Step3p5ForCausalLM` has the interface that tests use of transformers' classes, and stores tensors
under the names of published checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .plain_models import CausalModel

LOCAL = "sliding_attention"


class Step3p5Config(PretrainedConfig):
    """The keys of a published config.json, which are all given."""

    model_type = "step3p5_published"  # transformers has a class of its own for the name

    def __init__(self, **keys: Any):
        super().__init__(tie_word_embeddings=False)
        self.scaling = keys.pop("rope_scaling", None)  # transformers would put it elsewhere
        for key, value in keys.items():
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        keys = super().to_dict()
        return keys | {"model_type": "step3p5", "rope_scaling": keys.pop("scaling")}


class Norm(nn.Module):
    """Divide by the root mean square of the last dimension, and multiply by 1 + weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.weight)


def joined(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) * up, with silu(gate) at most `limit` and up within it; 0: no limit."""
    gate = gate * gate.sigmoid()
    if limit:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
    return gate * up


class FeedForward(nn.Module):
    """down(joined(gate x, up x))."""

    def __init__(self, width: int, hidden: int, limit: float):
        super().__init__()
        self.limit = limit
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(joined(self.gate_proj(x), self.up_proj(x), self.limit))


class Stack(nn.Module):
    """A matrix [rows, cols] for each expert."""

    def __init__(self, experts: int, rows: int, cols: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, rows, cols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, 1 or experts, cols] to [n, experts, rows]."""
        return torch.einsum("erc,nec->ner", self.weight, x.expand(-1, len(self.weight), -1))


class Mixture(nn.Module):
    """Experts that sigmoid scores with a bias choose."""

    def __init__(self, c: Step3p5Config, limit: float):
        super().__init__()
        self.c, self.limit, n, d, ff = (
            *(c, limit),
            *(c.moe_num_experts, c.hidden_size, c.moe_intermediate_size),
        )
        self.gate = nn.Linear(d, n, bias=False)
        self.router_bias = nn.Parameter(torch.zeros(n)) if c.use_moe_router_bias else None
        self.gate_proj, self.up_proj, self.down_proj = (
            Stack(n, ff, d),
            Stack(n, ff, d),
            Stack(n, d, ff),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, wide = self.gate(x).sigmoid(), x[:, None]
        biased = scores if self.router_bias is None else scores + self.router_bias
        chosen = biased.argsort(-1, descending=True)[:, : self.c.moe_top_k]
        shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        shares = shares / shares.sum(-1, keepdim=True) * self.c.moe_router_scaling_factor
        every = self.down_proj(joined(self.gate_proj(wide), self.up_proj(wide), self.limit))
        return (shares[..., None] * every).sum(1)


class Heads(nn.Module):
    """Causal attention of tokens [n, width], with a window in some layers, and a gate of each
    head.
    """

    def __init__(self, c: Step3p5Config, layer: int):
        super().__init__()
        self.c, self.layer, self.local = c, layer, c.layer_types[layer] == LOCAL
        sizes = c.attention_other_setting if self.local else c.to_dict()
        self.n, self.n_kv = sizes["num_attention_heads"], sizes["num_attention_groups"]
        d, size = c.hidden_size, c.head_dim
        self.q_proj = nn.Linear(d, self.n * size, bias=False)
        self.k_proj = nn.Linear(d, self.n_kv * size, bias=False)
        self.v_proj = nn.Linear(d, self.n_kv * size, bias=False)
        self.g_proj = nn.Linear(d, self.n, bias=False) if c.use_head_wise_attn_gate else None
        self.o_proj = nn.Linear(self.n * size, d, bias=False)
        self.q_norm, self.k_norm = Norm(size, c.rms_norm_eps), Norm(size, c.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, size = len(x), self.c.head_dim
        q, k, v = (
            product(x).view(n, -1, size).transpose(0, 1)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotated(self.q_norm(q)), self.rotated(self.k_norm(k))
        k, v = (y.repeat_interleave(self.n // self.n_kv, 0) for y in (k, v))
        apart = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (apart < 0) | (self.local & (apart >= self.c.sliding_window))
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(hidden, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1)
        if self.g_proj is not None:
            mixed = mixed * self.g_proj(x).sigmoid()[..., None]
        return self.o_proj(mixed.reshape(n, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs half of the rotated elements apart as complex numbers, by double angles."""
        c, size = self.c, self.c.head_dim
        n_rot = int(size * c.partial_rotary_factors[self.layer])
        theta = c.rope_theta
        base = theta[self.layer] if isinstance(theta, list) else theta
        rates = base ** -(torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)
        if c.scaling and not self.local:
            rates = torch.tensor([_scaled(float(rate), c.scaling) for rate in rates])
        angles = torch.outer(torch.arange(x.shape[1]).double(), rates.double())
        a, b, rest = x.double().split([n_rot // 2, n_rot // 2, size - n_rot], -1)
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, rest], -1).float()


def _scaled(rate: float, s: dict[str, Any]) -> float:
    """Return a rate as Llama 3 scales it: slow ones are divided by the factor, fast ones stay."""
    turns = s["original_max_position_embeddings"] * rate / (2 * math.pi)  # in the original context
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return rate * kept + rate / s["factor"] * (1 - kept)


class Layer(nn.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x))."""

    def __init__(self, c: Step3p5Config, number: int):
        super().__init__()
        d, limit = c.hidden_size, c.swiglu_limits_shared[number] or 0.0
        self.input_layernorm = Norm(d, c.rms_norm_eps)
        self.self_attn = Heads(c, number)
        self.post_attention_layernorm = Norm(d, c.rms_norm_eps)
        self.sparse = str(number) in c.moe_layers_enum.split(",")
        if self.sparse:
            self.moe = Mixture(c, c.swiglu_limits[number] or 0.0)
            self.share_expert = FeedForward(d, c.share_expert_dim, limit)
        else:
            self.mlp = FeedForward(d, c.intermediate_size, limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + (self.moe(y) + self.share_expert(y) if self.sparse else self.mlp(y))


class Step3p5ForCausalLM(CausalModel):
    """Logits [1, n, vocabulary] of one sequence of token ids [1, n]."""

    config_class, layer, norm = Step3p5Config, Layer, Norm

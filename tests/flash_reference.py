"""Random operands of flash attention, and what it should give."""

from __future__ import annotations

import torch

CUDA = torch.device("cuda")
BF16, F16 = torch.bfloat16, torch.float16
# Of results rounded to a half, and of shares: the norm of errors, relative.
LIMIT = {F16: 6e-4, BF16: 4e-3}


def operands(
    lengths, n, total, heads, kv_heads, sequences=1, half=F16, size=1.0, device=CUDA
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries times `size`, keys and values of a seed."""
    (key, value), g = lengths, torch.Generator(device).manual_seed(1)

    def random(*shape):
        return torch.randn(shape, device=device, generator=g)

    q = (random(sequences, n, heads, key) * size).to(half)
    k, v = (random(sequences, total, kv_heads, length).to(half) for length in (key, value))
    return q, k, v


def expected(q, k, v, scale, window=0, softcap=0.0, sinks=None):
    """Return float64[S, n, heads, value], one head after the other."""
    (_, n, heads, _), (_, total, kv_heads, _) = q.shape, k.shape
    last = torch.arange(total - n, total, device=q.device)[:, None]
    position = torch.arange(total, device=q.device)
    seen = (position <= last) & (position > last - window if window else True)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for head in range(heads):
        of = head // (heads // kv_heads)
        scores = q[:, :, head].double() @ k[:, :, of].double().mT * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks[head].double().expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], 2)
        out[:, :, head] = scores.softmax(2)[..., :total] @ v[:, :, of].double()
    return out

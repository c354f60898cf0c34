"""The recurrence of Mamba-2 (Dao and Gu, 2024), whose memory S of each head is a matrix
[state_length, head_length].

    S <- exp(a_t) S + b_t x_t^T        forget, and write
    o_t = S^T c_t                      read

Arguments of both forms: x float32[sequences, n, heads, head_length], multiplied by the length of
the step; b and c float32[sequences, n, groups, state_length]; decay (a) float32[sequences, n,
heads]; memory float32[sequences, heads, state_length, head_length]. Heads of a group follow each
other. Both return o, of the shape of x, and the memory after the last token.
"""

from __future__ import annotations

import torch

from .delta_rule import decays, in_chunks

CHUNK = 64  # tokens whose products are taken together


def by_steps(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the recurrence token by token. Shapes: see the module."""
    groups, out = b.shape[2], torch.empty_like(x)
    per_group = x.shape[2] // groups
    for t in range(x.shape[1]):
        write, read = (y[:, t].repeat_interleave(per_group, dim=1) for y in (b, c))
        memory = memory * decay[:, t, :, None, None].exp()
        memory = memory + write[..., None] * x[:, t, :, None]
        out[:, t] = (read[:, :, None] @ memory)[:, :, 0]
    return out, memory


def by_chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    memory: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the recurrence for `chunk` tokens at a time: within a chunk it is attention without
    softmax, whose scores c_i.b_j are multiplied by the decay between the tokens.
    """
    n, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, n)
    padding = -n % chunk  # tokens of zeros after the last one neither decay nor write
    # [sequences, groups, heads of the group or 1, chunks, chunk, length]
    x, b, c = (in_chunks(y, chunk, padding).unflatten(1, (groups, -1)) for y in (x, b, c))
    logarithms = in_chunks(decay[..., None], chunk, padding)[..., 0].unflatten(1, (groups, -1))
    between, since_start, to_end = decays(logarithms)
    within = (c @ b.transpose(-1, -2) * between) @ x
    written = b.transpose(-1, -2) @ (x * to_end[..., None])
    memory = memory.unflatten(1, (groups, -1))
    whole = since_start[..., -1, None, None]
    out = torch.empty_like(x)
    for i in range(x.shape[3]):
        seen = c[:, :, :, i] @ memory
        out[:, :, :, i] = within[:, :, :, i] + seen * since_start[:, :, :, i, :, None]
        memory = memory * whole[:, :, :, i] + written[:, :, :, i]
    return out.flatten(3, 4).flatten(1, 2)[:, :, :n].transpose(1, 2), memory.flatten(1, 2)

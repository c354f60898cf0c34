"""The gated delta rule (Yang et al., 2024): a linear recurrence whose memory S of each head is a
matrix [key_length, value_length].

    S <- exp(g_t) S                    forget
    e_t = beta_t (v_t - S^T k_t)       the error of what the memory has for the key
    S <- S + k_t e_t^T                 correct it
    o_t = S^T q_t                      read

Arguments of both forms: q and k float32[sequences, n, heads, key_length], v float32[sequences, n,
heads, value_length], decay (g) and beta float32[sequences, n, heads], memory float32[sequences,
heads, key_length, value_length]. Both return o, of the shape of v, and the memory after the last
token.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

CHUNK = 64  # tokens that are solved for together


def by_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the rule token by token. Shapes: see the module; the decay may also be that of each
    row of the memory, float32[sequences, n, heads, key_length].
    """
    decay = decay if decay.ndim == 4 else decay[..., None]
    out = torch.empty_like(v)
    for t in range(v.shape[1]):
        key = k[:, t, :, None]  # [sequences, heads, 1, key_length]
        memory = memory * decay[:, t, ..., None].exp()
        error = beta[:, t, :, None] * (v[:, t] - (key @ memory)[:, :, 0])
        memory = memory + key.transpose(-1, -2) * error[:, :, None]
        out[:, t] = (q[:, t, :, None] @ memory)[:, :, 0]
    return out, memory


def by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Evaluate the rule for `chunk` tokens at a time.

    Within a chunk, with G the running sum of g and D_ij = exp(G_i - G_j) for i >= j, the errors e
    are the solution of (I + strictly lower part of beta K K^T D) e = beta (V - exp(G) K S).
    """
    n = v.shape[1]
    chunk = min(chunk, n)
    padding = -n % chunk
    # Tokens of zeros after the last one change nothing: they do not decay and write nothing.
    q, k, v = (in_chunks(x, chunk, padding) for x in (q, k, v))
    beta = in_chunks(beta[..., None], chunk, padding)
    between, since_start, to_end = decays(in_chunks(decay[..., None], chunk, padding)[..., 0])
    weighted = k * beta
    lower = (weighted @ k.transpose(-1, -2) * between).tril(-1)
    right = torch.cat([v * beta, weighted * since_start[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    seen = q @ k.transpose(-1, -2) * between
    q, k = q * since_start[..., None], k * to_end[..., None]
    whole = since_start[..., -1, None, None]
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        errors = values[:, :, i] - keys[:, :, i] @ memory
        out[:, :, i] = q[:, :, i] @ memory + seen[:, :, i] @ errors
        memory = memory * whole[:, :, i] + k[:, :, i].transpose(-1, -2) @ errors
    return out.flatten(2, 3)[:, :, :n].transpose(1, 2), memory


def decays(logarithms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what decays make of memories within chunks, for their logarithms float32[..., chunk]:
    from after token j to after token i [..., chunk, chunk], 0 for i < j; from the start of the
    chunk to after each token, and from after each token to the end, both [..., chunk].
    """
    # Sums get large, and only their differences matter.
    total, chunk = logarithms.double().cumsum(-1), logarithms.shape[-1]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill_(~later, float("-inf"))
    between = between.exp().float()
    return between, total.exp().float(), (total[..., -1:] - total).exp().float()


def in_chunks(x: torch.Tensor, chunk: int, padding: int) -> torch.Tensor:
    """[sequences, n, heads, length] to [sequences, heads, chunks, chunk, length], with zeros for
    `padding` more tokens.
    """
    return F.pad(x.transpose(1, 2), (0, 0, 0, padding)).unflatten(2, (-1, chunk))

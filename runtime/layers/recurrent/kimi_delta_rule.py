"""The delta rule of Kimi delta attention (Kimi Team, 2025), whose memory S of each head is a matrix
[length, length] and decays by another factor in each row.

    S <- diag(exp(g_t)) S              forget
    e_t = beta_t (v_t - S^T k_t)       the error of what the memory has for the key
    S <- S + k_t e_t^T                 correct it
    o_t = S^T q_t                      read

`delta_rule.by_steps` evaluates it token by token. Arguments: q, k, v and decay (g)
float32[sequences, n, heads, length], beta float32[sequences, n, heads], memory float32[sequences,
heads, length, length]. Both return o, of the shape of v, and the memory after the last token.
"""

from __future__ import annotations

import torch

from .delta_rule import in_chunks

CHUNK = 16  # tokens that are solved for together: pairs of them have products of each element


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

    Within a chunk, with G the running sum of g and A_ij = sum over elements of k_i k_j exp(G_i -
    G_j) for i >= j, the errors e are the solution of (I + strictly lower part of beta A) e = beta
    (V - (exp(G) K) S).
    """
    n = v.shape[1]
    chunk = min(chunk, n)
    padding = -n % chunk
    # Tokens of zeros after the last one change nothing: they do not decay and write nothing.
    q, k, v, decay = (in_chunks(x, chunk, padding) for x in (q, k, v, decay))
    beta = in_chunks(beta[..., None], chunk, padding)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()[..., None]
    out = torch.empty_like(v)
    for i in range(v.shape[2]):
        # Sums get large, and only their differences matter.
        total = decay[:, :, i].double().cumsum(-2)
        between = total[..., :, None, :] - total[..., None, :, :]
        between = between.masked_fill_(~later, float("-inf")).exp_().float()
        seen = (q[:, :, i, :, None] * k[:, :, i, None] * between).sum(-1)
        alike = (k[:, :, i, :, None] * k[:, :, i, None] * between).sum(-1)
        since_start, to_end = total.exp().float(), (total[..., -1:, :] - total).exp().float()
        lower = (beta[:, :, i] * alike).tril(-1)
        right = beta[:, :, i] * (v[:, :, i] - (k[:, :, i] * since_start) @ memory)
        errors = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        out[:, :, i] = (q[:, :, i] * since_start) @ memory + seen @ errors
        memory = memory * since_start[..., -1, :, None]
        memory = memory + (k[:, :, i] * to_end).transpose(-1, -2) @ errors
    return out.flatten(2, 3)[:, :, :n].transpose(1, 2), memory

"""What the rows of a hidden state are: which sequence and which position."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """`n_sequences` independent sequences of `n_tokens` each; row s * n_tokens + t of the hidden state is token t of sequence s.

    `positions` int64[n_tokens] are ascending and the same for every sequence. State that a mixer carries from call to call
    (keys and values, a recurrent state) belongs here too.
    """

    n_sequences: int
    n_tokens: int
    positions: torch.Tensor

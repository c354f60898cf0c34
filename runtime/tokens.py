"""Token ids and hidden states that callers pass, checked, and what two lists have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from ..errors import ShapeError, printable

TokenIds: TypeAlias = Sequence[int] | np.ndarray | torch.Tensor


def as_tensor(token_ids: TokenIds) -> torch.Tensor:
    """Return one row of token ids as a tensor. Raise ShapeError for anything else."""
    try:
        tokens = (
            token_ids
            if isinstance(token_ids, torch.Tensor)
            else torch.as_tensor(np.asarray(token_ids))
        )
    except (TypeError, ValueError, OverflowError):  # texts, rows of different lengths, objects
        raise ShapeError(
            f"token ids are {printable(repr(token_ids), 60)}, expected integers"
        ) from None
    if tokens.ndim != 1:
        raise ShapeError(f"token ids have shape {list(tokens.shape)}, expected one dimension")
    return tokens


def checked_tokens(tokens: torch.Tensor, n_vocab: int, file: str | Path) -> torch.Tensor:
    """Return int64[sequences, n], ids below `n_vocab`. Raise ShapeError for anything else."""
    if not isinstance(tokens, torch.Tensor):
        raise ShapeError(
            f"token ids are a {type(tokens).__name__}, expected a torch.Tensor int[sequences, n]"
        )
    if (
        tokens.ndim != 2
        or tokens.numel() == 0
        or tokens.is_floating_point()
        or tokens.dtype == torch.bool
    ):
        raise ShapeError(
            f"token ids are {tokens.dtype}{list(tokens.shape)}, expected at least one integer"
            " id per sequence"
        )
    tokens = tokens.to(torch.int64)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= n_vocab:
        raise ShapeError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {n_vocab}",
            file=file,
        )
    return tokens


def check_hidden(hidden: torch.Tensor, width: int, file: str | Path) -> None:
    """ShapeError for anything but floats[rows, width]."""
    if (
        not isinstance(hidden, torch.Tensor)
        or hidden.ndim != 2
        or hidden.shape[1] != width
        or not hidden.is_floating_point()
    ):
        shown = (
            f"{hidden.dtype}{list(hidden.shape)}"
            if isinstance(hidden, torch.Tensor)
            else f"a {type(hidden).__name__}"
        )
        raise ShapeError(f"hidden states are {shown}, expected float32[rows, {width}]", file=file)


def n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two lists begin with in common."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))

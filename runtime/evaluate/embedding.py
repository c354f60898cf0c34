"""Embeddings of texts: final hidden states after the last norm, pooled and normalized."""

from __future__ import annotations

import numpy as np

from ...errors import EvaluationError, UsageError
from ..model import Model

POOLINGS = ("none", "mean", "cls", "last")
_STORED = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # `pooling_type` of a file
_INT16 = 32760.0  # what the largest value becomes with normalization 0


def pooling_of(model: Model, chosen: str | None) -> str:
    """Return how to pool: as chosen, else as the file says, else "none". UsageError for files of
    models that rank texts.
    """
    if chosen is not None:
        return chosen
    stored = model.hyperparameters.integer("pooling_type", 0)
    found = _STORED.get(stored, f"type {stored}")
    if found not in POOLINGS:
        raise UsageError(
            f"the model's pooling is {found}, which is not supported: choose one of"
            f" {', '.join(POOLINGS)} (--pooling)",
            file=model.source.path,
        )
    return found


def embedding(model: Model, text: str, pooling: str = "none", normalize: int = 2) -> np.ndarray:
    """Return float32[width], or float32[tokens, width] for the pooling "none".

    pooling: the mean over all tokens, or the first one ("cls") or the last. normalize: -1 for none,
    0 to divide by the largest absolute value and multiply by 32760, p for the p-norm (2 is
    Euclidean). Texts are tokenized with the tokens that the model wants before and after them.
    EvaluationError for a text without tokens.
    """
    tokens = model.tokenizer.encode(text, add_special=True, parse_special=True)
    if not tokens:
        raise EvaluationError("the text has no tokens")
    import torch

    hidden = model.hidden(torch.tensor([tokens]))[0].float().cpu().numpy()
    if pooling == "mean":
        hidden = hidden.mean(axis=0, dtype=np.float64)
    elif pooling != "none":
        hidden = hidden[0 if pooling == "cls" else -1]
    return normalized(hidden, normalize)


def normalized(x: np.ndarray, how: int) -> np.ndarray:
    """Return float32[..., width] with every vector divided by its norm; zeros stay zeros."""
    x = np.asarray(x, dtype=np.float64)
    if how < 0:
        return x.astype(np.float32)
    size = np.abs(x)
    if how == 0:
        norm = size.max(axis=-1, keepdims=True) / _INT16
    else:
        largest = size.max(axis=-1, keepdims=True)
        scaled = np.divide(size, largest, out=np.zeros_like(size), where=largest > 0)
        norm = largest * (scaled**how).sum(axis=-1, keepdims=True) ** (1 / how)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0).astype(np.float32)


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors; 0 if one is zero, 1 if both are."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    if sizes == 0:
        return float(not a.any() and not b.any())
    return float(a @ b) / sizes

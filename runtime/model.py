"""A model opened from a GGUF file: tokens in, logits out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch

from ..errors import ShapeError, UsageError
from ..formats.gguf.reader import open_gguf
from ..formats.source import Source
from .cache import CacheSettings, State, padded
from .hyperparameters import Hyperparameters
from .layers.batch import Batch
from .network import build_network
from .tokenizer import SpecialTokens, Tokenizer
from .weights import DEFAULT_CACHE_BYTES, DecodeCache, Weights

DEFAULT_UBATCH = 512  # tokens of a sequence that go through the model at a time


def load_model(path: str | os.PathLike, device: str | torch.device = "cpu", cache_bytes: int = DEFAULT_CACHE_BYTES) -> Model:
    """Open a GGUF file, or a split model through its first shard.

    Weights stay encoded in the mapped file; at most `cache_bytes` of decoded float32 matrices are kept on `device`.
    Raises MalformedFileError, ConfigError or ArchitectureError (which say what is wrong with the file), UsageError for a device
    that is not there.
    """
    device = _usable_device(device)
    if cache_bytes < 0:
        raise UsageError(f"cache_bytes is {cache_bytes}, expected 0 or more")
    source = open_gguf(path)
    try:
        return Model(source, device, cache_bytes)
    except BaseException:
        source.close()
        raise


class Model:
    """A network with its tokenizer. Close it, or use it as a context manager, to unmap the file."""

    def __init__(self, source: Source, device: torch.device, cache_bytes: int = DEFAULT_CACHE_BYTES):
        self.source, self.device = source, device
        self.hyperparameters = Hyperparameters(source.metadata, os.fspath(source.path))
        self.weights = Weights(source, device, DecodeCache(cache_bytes))
        self.network = build_network(self.hyperparameters, self.weights)
        self.n_vocab = self.network.n_vocab
        self.ubatch = DEFAULT_UBATCH

    @property
    def architecture(self) -> str:
        return self.hyperparameters.architecture

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built from the file's own vocabulary when first asked for. TokenizerError if that is not possible."""
        return Tokenizer.from_metadata(self.source.metadata, file=os.fspath(self.source.path))

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """BOS and EOS of the vocabulary, also where there is no tokenizer for it."""
        return SpecialTokens.read(self.source.metadata, file=os.fspath(self.source.path))

    def forward(self, token_ids: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """Logits float32[n, vocab] of one sequence of n token ids, each row predicting the token after it.

        Evaluating twice gives the same bits. ShapeError if `token_ids` is not a non-empty row of ids below the vocabulary size.
        """
        return self.logits(self.hidden(_as_tensor(token_ids)[None])[0])

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Final hidden states float32[sequences, n, width], normed, of independent sequences int[sequences, n] from position `start`."""
        tokens = self._checked(tokens)
        n_sequences, n_tokens = tokens.shape
        h = self.network.hidden(tokens.reshape(-1), Batch.of(n_sequences, n_tokens, start, self.device))
        return h.view(n_sequences, n_tokens, -1)

    def new_state(self, capacity: int, settings: CacheSettings = CacheSettings()) -> State:
        """An empty sequence for at most `capacity` tokens (rounded up to a multiple of `cache.PADDING`).

        UsageError for cache types that do not suit the model's heads.
        """
        if capacity < 1:
            raise UsageError(f"a sequence of {capacity} tokens was asked for, expected at least 1")
        return self.network.new_state(padded(capacity), settings)

    @torch.no_grad()
    def extend(self, token_ids: Sequence[int] | np.ndarray | torch.Tensor, state: State, all_logits: bool = False) -> torch.Tensor:
        """Append tokens to the sequence of `state`: logits float32[vocab] after the last one, or float32[n, vocab] with `all_logits`.

        At most `ubatch` tokens go through the model at a time. ShapeError for tokens as in `forward`, or more than the state holds.
        """
        tokens = self._checked(_as_tensor(token_ids)[None])[0]
        if state.n_past + len(tokens) > state.capacity:
            raise ShapeError(f"{state.n_past} tokens and {len(tokens)} more do not fit a sequence of at most {state.capacity}")
        logits = []
        for piece in tokens.split(self.ubatch):
            h = self.network.hidden(piece, Batch.of(1, len(piece), state.n_past, self.device), state)
            if all_logits:
                logits.append(self.network.output(h))
        return torch.cat(logits) if all_logits else self.network.output(h[-1:])[0]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[rows, width] of `hidden` to float32[rows, vocab]."""
        return self.network.output(hidden)

    @contextmanager
    def observe(self, callback: Callable[[str, torch.Tensor, torch.Tensor | None], None]) -> Iterator[None]:
        """Within this context `callback(tensor name, x, experts)` is called for every product with a weight matrix.

        x is float32[rows, n_in], not to be kept or changed. For expert tensors there is one call with all rows, grouped by
        expert, and experts int64[rows] says whose each is; it is None for other tensors.
        """
        self.weights.observers.append(callback)
        try:
            yield
        finally:
            self.weights.observers.remove(callback)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _checked(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.ndim != 2 or tokens.numel() == 0 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ShapeError(f"token ids are {tokens.dtype}{list(tokens.shape)}, expected at least one integer id per sequence")
        tokens = tokens.to(torch.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.n_vocab:
            raise ShapeError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.n_vocab}", file=self.source.path)
        return tokens.to(self.device)


def _as_tensor(token_ids: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    tokens = token_ids if isinstance(token_ids, torch.Tensor) else torch.as_tensor(np.asarray(token_ids))
    if tokens.ndim != 1:
        raise ShapeError(f"token ids have shape {list(tokens.shape)}, expected one dimension")
    return tokens


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from None
    return device

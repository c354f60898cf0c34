"""What an architecture file builds, and the table of architectures.

A file in `architectures/` declares the GGUF architectures it knows:

    @architecture("llama")
    def build(p: Hyperparameters, w: Weights) -> Network: ...

and is found by being there. Two files that declare the same name are an error at import.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ArchitectureError, printable
from .cache import CacheSettings, State
from .hyperparameters import Hyperparameters
from .layers.batch import Batch
from .layers.block import Block
from .layers.norm import RMSNorm
from .linear import Embedding, Linear
from .weights import Weights


@dataclass(frozen=True)
class Network:
    """Embedding, blocks, final norm and output projection.

    Blocks need not be alike. A block is called as block(h, batch), has the `device` it works on,
    and `new_state(capacity, settings)`.
    """

    embedding: Embedding
    blocks: Sequence[Block]
    output_norm: RMSNorm
    output: Linear
    n_vocab: int

    @property
    def output_device(self) -> torch.device:
        """Where final hidden states and logits are: with the final norm, wherever the output matrix
        lies.
        """
        return self.output_norm.weight.device

    def new_state(self, capacity: int, settings: CacheSettings) -> State:
        """An empty sequence of at most `capacity` tokens."""
        return State(
            capacity, [block.new_state(capacity, settings) for block in self.blocks], settings
        )

    def hidden(
        self, tokens: torch.Tensor, batch: Batch, state: State | None = None
    ) -> torch.Tensor:
        """Final hidden states float32[rows, width], normed, of the rows of `batch`: tokens
        int64[rows]. `state` takes them in.
        """
        h = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            h = block(
                h.to(block.device),
                batch.at(None if state is None else state.layers[i], block.device),
            )
        if state is not None:
            state.n_past += batch.n_tokens
        return self.output_norm(h.to(self.output_device))


Builder = Callable[[Hyperparameters, Weights], Network]
_BUILDERS: dict[str, Builder] = {}


def architecture(*names: str) -> Callable[[Builder], Builder]:
    """Declares the decorated function as the builder of these GGUF architectures."""

    def declare(build: Builder) -> Builder:
        for name in names:
            if name in _BUILDERS:
                raise RuntimeError(f"architecture '{name}' is declared twice")
            _BUILDERS[name] = build
        return build

    return declare


def architectures() -> dict[str, Builder]:
    """All declared architectures by name."""
    from . import architectures as folder

    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
    return _BUILDERS


def build_network(p: Hyperparameters, w: Weights) -> Network:
    """The network of an opened file. ArchitectureError if its architecture is unknown or it has
    tensors beyond it.
    """
    known = architectures()
    if p.architecture not in known:
        raise ArchitectureError(
            f"architecture '{printable(p.architecture)}' is not supported; known are"
            f" {', '.join(sorted(known))}",
            file=p.file,
        )
    network = known[p.architecture](p, w)
    w.check_all_used()
    return network

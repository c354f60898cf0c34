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
from .hyperparameters import Hyperparameters
from .layers.batch import Batch
from .layers.norm import RMSNorm
from .linear import Embedding, Linear
from .weights import Weights


@dataclass(frozen=True)
class Network:
    """Embedding, blocks (any callables h, batch -> h; they need not be alike), final norm and output projection."""

    embedding: Embedding
    blocks: Sequence[Callable[[torch.Tensor, Batch], torch.Tensor]]
    output_norm: RMSNorm
    output: Linear
    n_vocab: int


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
    """The network of an opened file. ArchitectureError if its architecture is unknown or it has tensors beyond it."""
    known = architectures()
    if p.architecture not in known:
        raise ArchitectureError(f"architecture '{printable(p.architecture)}' is not supported; known are {', '.join(sorted(known))}",
                                file=p.file)
    network = known[p.architecture](p, w)
    w.check_all_used()
    return network

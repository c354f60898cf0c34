"""One file per GGUF architecture. A file declares the architectures that it builds, and is found
because it is in this folder:

@architecture("llama", gpu=True)
def build(d: Decoder) -> Network: ...

It fills in the descriptions of layers (`layers/specs.py`) and never mentions kernels.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ArchitectureError, printable
from ..network.decoder import Decoder
from ..network.network import Network
from ..weights.hyperparameters import Hyperparameters
from ..weights.weights import Weights

Builder = Callable[[Decoder], Network]


@dataclass(frozen=True)
class Declaration:
    """The builder of an architecture. gpu: executors of the fast path run all of its layers.
    layer_norm: its norms are LayerNorms; None: unless a file has the epsilon of RMS norms. hybrid:
    layers may have no attention.
    """

    build: Builder
    gpu: bool = False
    layer_norm: bool | None = False
    hybrid: bool = False


_DECLARED: dict[str, Declaration] = {}


def architecture(
    *names: str, gpu: bool = False, layer_norm: bool | None = False, hybrid: bool = False
) -> Callable[[Builder], Builder]:
    """Declare the decorated function as the builder of these GGUF architectures. Arguments: see
    `Declaration`.
    """

    def declare(build: Builder) -> Builder:
        for name in names:
            if name in _DECLARED:
                raise RuntimeError(f"architecture '{name}' is declared twice")
            _DECLARED[name] = Declaration(build, gpu, layer_norm, hybrid)
        return build

    return declare


def architectures() -> dict[str, Declaration]:
    """Return all declared architectures by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_DECLARED.items()))


def declaration(name: str, file: str) -> Declaration:
    """Return the declaration of an architecture. ArchitectureError, which lists the architectures
    that run, if there is none.
    """
    known = architectures()
    if name not in known:
        raise ArchitectureError(
            f"architecture '{printable(name)}' cannot run yet; the runtime supports"
            f" {', '.join(known)}",
            file=file,
        )
    return known[name]


def build_network(p: Hyperparameters, w: Weights) -> Network:
    """Build the network of an opened file. ArchitectureError if its architecture cannot run, if it
    has no tensors, or if it has tensors that the architecture does not use.
    """
    declared = declaration(p.architecture, p.file)
    if not w.source.tensors:
        raise ArchitectureError("has no tensors: a vocabulary alone cannot run", file=p.file)
    network = declared.build(
        Decoder.read(p, w, layer_norm=declared.layer_norm, hybrid=declared.hybrid)
    )
    w.check_all_used()
    return network

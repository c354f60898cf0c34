"""What the runtime supports, per architecture: the runtime's columns of the support matrix."""

from __future__ import annotations

from dataclasses import dataclass

from .architectures import architectures


@dataclass(frozen=True)
class Support:
    """How an architecture can run.

    cpu: on the reference path, which also runs on a GPU. gpu: on the fast path, with an executor
    for prompts and for steps of every layer. tensor_parallel: split over several devices, by
    `-sm graph`.
    """

    architecture: str
    cpu: bool
    gpu: bool
    tensor_parallel: bool


def supported_architectures() -> dict[str, Support]:
    """Return what is supported for every GGUF architecture that the runtime builds, by name."""
    return {
        name: Support(
            name,
            cpu=True,
            gpu=declared.gpu,
            tensor_parallel=True,
        )
        for name, declared in architectures().items()
    }

"""Graphs of a device that is the CPU: they record launches and repeat them."""

from __future__ import annotations

import weakref
from functools import partial, wraps
from typing import ClassVar

import torch

CPU = torch.device("cpu")


class Graph:
    """A stand-in for torch.cuda.CUDAGraph: launches during the capture run when it is replayed, on
    the memory of the capture.
    """

    recording: Graph | None = None
    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    replays = 0

    def __init__(self):
        self.launches = []
        Graph.alive.add(self)

    def replay(self) -> None:
        Graph.replays += 1
        for function, arguments in self.launches:
            function(*arguments)


def kernel(function):
    """Launch: work at once, or record."""

    @wraps(function)
    def launch(*arguments, pdl: bool = True, out: torch.Tensor | None = None, **options):
        arguments = arguments if out is None else (*arguments, out)
        if Graph.recording is None:
            function(*arguments, **options)
        else:
            Graph.recording.launches.append((partial(function, **options), arguments))

    return launch


class Launched:
    """A kernel that has sizes of its own: `run` is what a launch of it does."""

    def __call__(self, *arguments):
        kernel(self.run)(*arguments)

    def run(self, *arguments):
        raise NotImplementedError

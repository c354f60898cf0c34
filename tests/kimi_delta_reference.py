"""Random layers of Kimi delta attention on the reference path, to compare kernels with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from iqforge.cuda_kernels.step.kimi_delta import KimiDeltaShape
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.recurrent.kimi_delta import KimiDelta
from iqforge.runtime.layers.specs import KimiDeltaSpec
from iqforge.runtime.state.recurrent import RecurrentState

# rows, heads, length of keys and values, taps
STEPS = [(1, 4, 16, 4), (8, 3, 20, 3), (3, 2, 36, 2)]


@dataclass
class Case:
    """A layer without matrices, what its products give for new rows (queries, keys, values, decay,
    gate and beta), and what was kept before them.
    """

    shape: KimiDeltaShape
    net: KimiDelta
    products: list[torch.Tensor]
    state: RecurrentState

    def expected(self) -> tuple[torch.Tensor, RecurrentState]:
        """The result, and the state after it."""
        state = self.copied()
        return mixed(self.net, self.products, state), state

    def copied(self) -> RecurrentState:
        """A copy of what was kept."""
        memory = self.state.memory
        copy = RecurrentState(*self.state.inputs.shape, tuple(memory.shape), memory.device)
        copy.load(0, self.state.save(0, 0))
        return copy


def mixed(net: KimiDelta, products: list[torch.Tensor], state: RecurrentState) -> torch.Tensor:
    """What the layer gives for these products after a state."""
    q, k, v, decay, gate, beta = products
    states: Any = (SimpleNamespace(layers=[state]),)
    batch = Batch((len(q),), (0,), torch.arange(len(q), device=q.device), states)
    return net.mixed(torch.cat([q, k, v], dim=1), decay, gate, beta, batch)


def kimi_delta(shape: KimiDeltaShape, **tensors) -> KimiDelta:
    """A layer of a shape without matrices."""
    same: Any = lambda x: x  # noqa: E731
    products = {"qkv": (same,) * 3, "decay": (same,) * 2, "gate": (same,) * 2, "beta": same}
    spec = KimiDeltaSpec(shape.heads, shape.length, shape.taps)
    return KimiDelta(spec, output=same, **products, **tensors)


def kimi_delta_case(case: tuple, device: torch.device) -> Case:
    """A random layer of a shape as in STEPS."""
    shape = KimiDeltaShape(*case)
    g = torch.Generator(device).manual_seed(0)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    inner = shape.heads * shape.length
    net = kimi_delta(
        shape,
        convolution=random(3 * inner, shape.taps),
        dt=random(inner),
        a=-random(shape.heads).exp(),
        norm=RMSNorm(1 + 0.1 * random(shape.length), 1e-5),
    )
    memory = (shape.heads, shape.length, shape.length)
    state = RecurrentState(shape.taps - 1, 3 * inner, memory, device)
    state.inputs.copy_(random(*state.inputs.shape))
    state.memory.copy_(0.3 * random(*memory))
    products = [random(shape.rows, inner) for _ in range(5)] + [random(shape.rows, shape.heads)]
    return Case(shape, net, products, state)

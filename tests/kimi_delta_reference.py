"""Random layers of Kimi delta attention on the reference path, to compare kernels with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from iqforge.cuda_kernels.common.delta_heads import DeltaHeads
from iqforge.cuda_kernels.step.kimi_delta import KimiDeltaShape
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.recurrent.kimi_delta import KimiDelta
from iqforge.runtime.layers.specs import KimiDeltaSpec
from iqforge.runtime.state.recurrent import RecurrentState

from .delta_reference import PromptCheck

# rows, heads, length of keys and values, taps, and in some the bound of decays
STEPS = [(1, 4, 16, 4), (8, 3, 20, 3), (3, 2, 36, 2), (1, 4, 16, 4, -5.0), (8, 3, 20, 3, -0.75)]

# sequences, tokens of each, heads, length, taps, and in one the bound of decays
PROMPTS = [(1, 150, 2, 16, 4), (2, 64, 3, 20, 3), (1, 1, 1, 132, 2), (1, 70, 2, 16, 4, -5.0)]


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


@dataclass
class Prompt(PromptCheck):
    """The layer of `case` on new sequences, or after what the only one kept: products, decay and
    gate half[rows, ...], beta float32[rows, heads] before its sigmoid.
    """

    case: Case
    heads: DeltaHeads
    n_sequences: int
    products: torch.Tensor
    decay: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    expected: torch.Tensor
    after: RecurrentState


def prompt_case(case: tuple, half: torch.dtype, device: torch.device, decay: float = 1) -> Prompt:
    """A random layer on random rows, as in PROMPTS. What one sequence kept is not empty. decay: a
    factor of the logarithms of decays.
    """
    n_sequences, tokens, *shape = case
    c = kimi_delta_case((n_sequences * tokens, *shape), device)
    c.net.a *= decay
    q, k, v, *rest = (x.to(half) for x in c.products)
    decays, gate, _ = rest
    beta = c.products[-1]
    inputs = [x.float() for x in (torch.cat([q, k, v], dim=1), decays, gate)]
    s = c.shape
    heads = DeltaHeads(s.heads, s.heads, s.length, s.length, s.taps, True, False)
    if n_sequences == 1:
        after = c.copied()
        expected = mixed(c.net, [q.float(), k.float(), v.float(), *inputs[1:], beta], after)
    else:
        after = c.state
        expected = c.net.mixed(*inputs, beta, Batch.of(n_sequences, tokens, 0, device))
    products = torch.cat([q, k, v, decays[:, :4]], dim=1)  # and something else
    return Prompt(c, heads, n_sequences, products, decays, gate, beta, expected, after)


def kimi_delta(shape: KimiDeltaShape, **tensors) -> KimiDelta:
    """A layer of a shape without matrices."""
    same: Any = lambda x: x  # noqa: E731
    products = {"qkv": (same,) * 3, "decay": (same,) * 2, "gate": (same,) * 2, "beta": same}
    spec = KimiDeltaSpec(shape.heads, shape.length, shape.taps, shape.bound)
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
        a=random(shape.heads).exp() * (1 if shape.bound else -1),
        norm=RMSNorm(1 + 0.1 * random(shape.length), 1e-5),
    )
    memory = (shape.heads, shape.length, shape.length)
    state = RecurrentState(shape.taps - 1, 3 * inner, memory, device)
    state.inputs.copy_(random(*state.inputs.shape))
    state.memory.copy_(0.3 * random(*memory))
    products = [random(shape.rows, inner) for _ in range(5)] + [random(shape.rows, shape.heads)]
    return Case(shape, net, products, state)

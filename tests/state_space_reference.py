"""Random state-space layers on the reference path, to compare kernels with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from iqforge.cuda_kernels.prompt.state_space import StateSpaceWeights
from iqforge.cuda_kernels.step.state_space import StateSpaceShape
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.recurrent.state_space import StateSpace
from iqforge.runtime.layers.specs import StateSpaceSpec
from iqforge.runtime.state.recurrent import RecurrentState

# rows, heads, groups, length of a head, of the vectors, taps
STEPS = [(1, 4, 2, 16, 16, 4), (8, 6, 1, 12, 20, 3), (3, 2, 2, 36, 32, 2)]

# sequences, tokens of each, heads, groups, length of a head, of the vectors, taps
PROMPTS = [
    (1, 150, 4, 2, 16, 16, 4),
    (2, 64, 6, 1, 36, 20, 3),
    (1, 1, 2, 1, 12, 132, 2),
    (1, 70, 2, 2, 64, 36, 4),
]


@dataclass
class Case:
    """A layer without matrices, what its first product gives for new rows, and what was kept before
    them.
    """

    shape: StateSpaceShape
    net: StateSpace
    products: torch.Tensor
    state: RecurrentState

    def expected(self) -> tuple[torch.Tensor, RecurrentState]:
        """The result, and the state after it."""
        rows, state = self.shape.rows, self.copied()
        states: Any = (SimpleNamespace(layers=[state]),)
        positions = torch.arange(rows, device=self.products.device)
        return self.net.mixed(self.products, Batch((rows,), (0,), positions, states)), state

    def copied(self) -> RecurrentState:
        """A copy of what was kept."""
        memory = self.state.memory
        copy = RecurrentState(*self.state.inputs.shape, tuple(memory.shape), memory.device)
        copy.load(0, self.state.save(0, 0))
        return copy


def state_space(shape: StateSpaceShape, **tensors) -> StateSpace:
    """A layer of a shape without matrices."""
    s = shape
    spec = StateSpaceSpec(s.heads, s.length, s.state, s.groups, s.taps)
    same: Any = lambda x: x  # noqa: E731
    return StateSpace(spec, input=same, output=same, **tensors)


def state_space_case(
    case: tuple, device: torch.device, *, bias: bool = True, norm: bool = True
) -> Case:
    """A random layer of a shape as in STEPS."""
    shape = StateSpaceShape(*case)
    g = torch.Generator(device).manual_seed(0)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731
    inner, n = shape.heads * shape.length, shape.heads
    channels = inner + 2 * shape.groups * shape.state
    net = state_space(
        shape,
        convolution=random(channels, shape.taps) * 0.5,
        bias=random(channels) if bias else None,
        dt=random(n),
        a=-random(n).exp(),
        d=random(n),
        norm=1 + 0.1 * random(shape.groups, inner // shape.groups) if norm else None,
        eps=1e-5,
    )
    state = RecurrentState(shape.taps - 1, channels, (n, shape.state, shape.length), device)
    state.inputs.copy_(random(*state.inputs.shape))
    state.memory.copy_(0.3 * random(*state.memory.shape))
    return Case(shape, net, random(shape.rows, inner + channels + n), state)


@dataclass
class Prompt:
    """The layer of `case` on new sequences, or after what the only one kept: products half[rows,
    ...], the result and the state after it.
    """

    case: Case
    n_sequences: int
    products: torch.Tensor
    expected: torch.Tensor
    after: RecurrentState

    @property
    def weights(self) -> StateSpaceWeights:
        net = self.case.net
        return StateSpaceWeights(net.convolution, net.bias, net.dt, net.a, net.d, net.norm, net.eps)

    def run(self, evaluate, kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results half[rows, ...] and the memory that `evaluate`, which is `state_space`
        of the kernels, leaves.
        """
        state, device = self.case.copied(), self.products.device
        kept = (state.inputs, state.memory, state.memory)
        out = torch.full(
            self.expected.shape, float("nan"), dtype=self.products.dtype, device=device
        )
        evaluate(
            kernels,
            self.weights,
            self.products,
            self.n_sequences,
            *(kept if self.n_sequences == 1 else (None, None, None)),
            out,
            lambda name, shape, dtype: torch.full(shape, float("nan"), dtype=dtype, device=device),
        )
        return out, state.memory

    def check(self, out: torch.Tensor, memory: torch.Tensor) -> None:
        """Check half[rows, ...] and the memory: factors are rounded to 10 bits, results to
        a half.
        """
        limit = 1.5e-3 if out.dtype == torch.float16 else 4e-3
        error = (out.float() - self.expected).norm()
        assert error < limit * self.expected.norm()
        assert (memory - self.after.memory).norm() <= 1e-3 * self.after.memory.norm()


def prompt_case(
    case: tuple, half: torch.dtype, device: torch.device, *, norm: bool = True
) -> Prompt:
    """A random layer on random rows, as in PROMPTS. What one sequence kept is not empty."""
    n_sequences, tokens, *shape = case
    rows = n_sequences * tokens
    c = state_space_case((rows, *shape), device, bias=n_sequences == 1, norm=norm)
    products = c.products.to(half)
    c.products = products.float()
    if n_sequences == 1:
        expected, after = c.expected()
    else:
        expected = c.net.mixed(c.products, Batch.of(n_sequences, tokens, 0, device))
        after = c.state
    return Prompt(c, n_sequences, products, expected, after)

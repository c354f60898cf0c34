"""Random delta nets on the reference path, to compare kernels with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from iqforge.cuda_kernels.common.delta_heads import DeltaHeads
from iqforge.cuda_kernels.prompt.delta_chunks import DeltaWeights
from iqforge.cuda_kernels.step.delta import DeltaShape
from iqforge.runtime.cuda.common.delta_shapes import rates_in_order
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.recurrent.delta_net import DeltaNet
from iqforge.runtime.layers.specs import DeltaNetSpec
from iqforge.runtime.state.recurrent import RecurrentState

# rows, width, key heads, value heads, key length, value length, taps, tiled, joined
STEPS = [
    (1, 64, 2, 4, 16, 16, 4, True, False),
    (8, 32, 2, 6, 16, 16, 4, False, False),
    (3, 48, 2, 4, 20, 12, 3, False, True),
    (2, 20, 1, 1, 32, 36, 2, True, False),
]

# sequences, tokens of each, key heads, value heads, key length, value length, taps, tiled, joined
PROMPTS = [
    (1, 150, 2, 4, 16, 16, 4, True, False),
    (2, 64, 2, 4, 20, 36, 3, False, True),
    (1, 1, 1, 2, 132, 8, 2, False, False),
]


@dataclass
class Case:
    """A delta net without output matrix, the norm before it, new rows h, and what was kept before
    them. `rates` float32[2, value_heads, width]: the matrices of beta and alpha.
    """

    shape: DeltaShape
    net: DeltaNet
    norm: RMSNorm
    h: torch.Tensor
    state: RecurrentState
    rates: torch.Tensor

    @property
    def products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the convolution and the gates, one tensor if they are joined."""
        x, net = self.norm(self.h), self.net
        if net.qkvz is not None:
            return (joined := net.qkvz(x)), joined
        assert net.qkv is not None and net.gate is not None
        return net.qkv(x), net.gate(x)

    def expected(self) -> tuple[torch.Tensor, RecurrentState]:
        """The result, and the state after it."""
        s, state = self.shape, self.copied()
        states: Any = (SimpleNamespace(layers=[state]),)
        positions = torch.arange(s.rows, device=self.h.device)
        return self.net(self.norm(self.h), Batch((s.rows,), (0,), positions, states)), state

    def copied(self) -> RecurrentState:
        """A copy of what was kept."""
        memory = self.state.memory
        copy = RecurrentState(*self.state.inputs.shape, tuple(memory.shape), memory.device)
        copy.load(0, self.state.save(0, 0))
        return copy


def delta_case(case: tuple, device: torch.device, *, empty: bool = False, seed: int = 0) -> Case:
    """A random net of a shape as in STEPS. empty: nothing was kept before."""
    rows, width, *heads = case
    shape = DeltaShape(rows, width, s := DeltaHeads(*heads))
    g = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=g)  # noqa: E731

    def dense(rows: int) -> Any:
        weight = random(rows, width) * width**-0.5
        return lambda x: x @ weight.T

    spec = DeltaNetSpec(s.key_heads, s.value_heads, s.key_length, s.value_length, s.taps, s.tiled)
    ba = random(2 * s.value_heads, width) * width**-0.5
    beta, alpha = ba.chunk(2)
    inputs, values = {}, s.value_heads * s.value_length
    if s.joined:
        inputs = {"qkvz": dense(spec.channels + values), "ba": lambda x: x @ ba.T}
        rates = rates_in_order(ba, s.key_heads)
    else:
        inputs = {
            "qkv": dense(spec.channels),
            "gate": dense(values),
            "beta": lambda x: x @ beta.T,
            "alpha": lambda x: x @ alpha.T,
        }
        rates = torch.stack([beta, alpha])
    net = DeltaNet(
        spec,
        convolution=random(spec.channels, s.taps) * 0.5,
        dt=random(s.value_heads),
        a=-random(s.value_heads).exp(),
        norm=RMSNorm(1 + 0.1 * random(s.value_length), 1e-6),
        output=lambda x: x,  # pyright: ignore[reportArgumentType]  any function
        **inputs,
    )
    memory = (s.value_heads, s.key_length, s.value_length)
    state = RecurrentState(s.taps - 1, spec.channels, memory, device)
    if not empty:
        state.inputs.copy_(random(*state.inputs.shape))
        state.memory.copy_(0.3 * random(*memory))
    norm = RMSNorm(1 + 0.1 * random(width), 1e-5)
    return Case(shape, net, norm, 3 * random(rows, width), state, rates.contiguous())


class PromptCheck:
    """What a layer with the net of `case` gives for a prompt: the result and the state after it."""

    case: Any
    expected: torch.Tensor
    after: RecurrentState

    @property
    def weights(self) -> DeltaWeights:
        net = self.case.net
        return DeltaWeights(net.convolution, net.dt, net.a, net.norm.weight, net.norm.eps)

    def check(self, out: torch.Tensor, memory: torch.Tensor) -> None:
        """Check half[rows, ...] and the memory: factors are rounded to TF32, results to a half."""
        limit = 1.5e-3 if out.dtype == torch.float16 else 4e-3
        error = (out.float() - self.expected).norm()
        assert error < limit * self.expected.norm()
        assert (memory - self.after.memory).norm() <= 1e-3 * self.after.memory.norm()


@dataclass
class Prompt(PromptCheck):
    """The delta net of `case` on new sequences, or after what the only one kept: products and gates
    half[rows, ...], rates float32[rows, 2 * value_heads], the result and the state after it.
    """

    case: Case
    heads: DeltaHeads
    n_sequences: int
    products: torch.Tensor
    z: torch.Tensor
    rates: torch.Tensor
    expected: torch.Tensor
    after: RecurrentState


def prompt_case(case: tuple, half: torch.dtype, device: torch.device) -> Prompt:
    """A random net on random rows, as in PROMPTS. What one sequence kept is not empty."""
    n_sequences, tokens, *shape = case
    c = delta_case((n_sequences * tokens, 64, *shape), device)
    c.state = c.state if n_sequences == 1 else delta_case((1, 64, *shape), device, empty=True).state
    products, z = (x.to(half) for x in c.products)
    net, x = c.net, c.norm(c.h)
    if net.qkvz is not None:
        net.qkvz = lambda x: products.float()
    else:
        net.qkv, net.gate = lambda x: products.float(), lambda x: z.float()
    if n_sequences == 1:
        expected, after = c.expected()
    else:
        expected, after = net(x, Batch.of(n_sequences, tokens, 0, device)), c.state
    rates = x @ c.rates.flatten(0, 1).T
    return Prompt(c, c.shape.heads, n_sequences, products, z, rates, expected, after)

"""Layers of a decode step that have recurrent states, as plain torch on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from iqforge.cuda_kernels.step import short_conv as step_conv
from iqforge.cuda_kernels.step.recurrent import StepState
from iqforge.runtime.cuda.step import delta as step_delta
from iqforge.runtime.cuda.step import recurrent as step_recurrent
from iqforge.runtime.layers.batch import Batch
from iqforge.runtime.layers.norm import RMSNorm
from iqforge.runtime.layers.recurrent.delta_net import DeltaNet
from iqforge.runtime.layers.specs import DeltaNetSpec
from iqforge.runtime.state.recurrent import RecurrentState
from torch.nn import functional as F

from .kimi_delta_reference import kimi_delta, mixed
from .state_space_reference import state_space
from .step_graphs_on_cpu import CPU, Launched, kernel
from .step_rows_on_cpu import normed


def places(state, other, positions, begun):
    """Return where a step reads its state and where it writes it. With two places, they change
    after every step.
    """
    odd = other is not None and int(positions[0] - begun[0]) % 2 == 1
    return (state, state if other is None else other)[:: -1 if odd else 1]


def mix(mixer, x, held, to, out):
    """Run a mixer of the reference path on rows of one sequence. held, to: (inputs, memory) before
    the step, and where those after it go.
    """
    state = RecurrentState(*held[0].shape, tuple(held[1].shape), CPU)
    state.load(0, (0, *held))
    states = (SimpleNamespace(layers=[state]),)
    out.copy_(mixer(x, Batch((len(x),), (0,), torch.arange(len(x)), states)))
    for place, new in zip(to, (state.inputs, state.memory)):
        place.copy_(new)


def places_of(state: StepState):
    """Return `places` for both parts of a state."""
    both = state.inputs, state.memory
    return places(both, state.other, state.positions, state.begun)


class Delta(Launched):
    """A delta net on the reference path."""

    def __init__(self, shape, device):
        self.shape = shape

    def run(
        self,
        h,
        norm,
        eps,
        rates,
        dt,
        a,
        products,
        z,
        taps,
        out_norm,
        out_eps,
        state,
        out,
    ):
        heads, x = self.shape.heads, normed(h, norm, eps)
        net = delta_net(heads, taps, dt, a, RMSNorm(out_norm, out_eps), products, z)
        net.beta, net.alpha = (lambda x, w=w: F.linear(x, w) for w in rates)
        mix(net, x, *places_of(state), out)


@kernel
def short_conv(products, taps, inputs, other, positions, begun, out):
    held, to = places(inputs, other, positions, begun)
    both = torch.cat([held, products[:, : taps.shape[0]] * products[:, 2 * taps.shape[0] :]])
    out.copy_(convolved(both, taps) * products[:, taps.shape[0] : 2 * taps.shape[0]])
    to.copy_(both[len(both) - len(held) :])


def convolved(x, taps):
    """The convolution of x[taps - 1 + rows, channels], float32[rows, channels]."""
    return torch.einsum("rct,ct->rc", x.unfold(0, taps.shape[1], 1), taps)


def delta_net(heads, taps, dt, a, norm, products, z):
    """A delta net whose products are known, without rates and output matrix."""
    spec = DeltaNetSpec(
        heads.key_heads,
        heads.value_heads,
        heads.key_length,
        heads.value_length,
        heads.taps,
        heads.tiled,
    )
    inputs = (
        {"qkvz": lambda x: products}
        if heads.joined
        else {"qkv": lambda x: products, "gate": lambda x: z}
    )
    return DeltaNet(spec, convolution=taps, dt=dt, a=a, norm=norm, output=lambda x: x, **inputs)


class StateSpace(Launched):
    """A state-space layer on the reference path."""

    def __init__(self, shape, device):
        self.shape = shape

    def run(
        self,
        products,
        taps,
        bias,
        dt,
        a,
        d,
        norm,
        eps,
        state,
        out,
    ):
        weights = {"convolution": taps, "bias": bias, "dt": dt, "a": a, "d": d, "norm": norm}
        net = state_space(self.shape, eps=eps, **weights)
        mix(net.mixed, products, *places_of(state), out)


class KimiDelta(Launched):
    """Kimi delta attention on the reference path."""

    def __init__(self, shape, device):
        self.shape = shape

    def run(self, q, k, v, decay, gate, beta, taps, dt, a, norm, eps, state, out):
        net = kimi_delta(self.shape, convolution=taps, dt=dt, a=a, norm=RMSNorm(norm, eps))
        held, to = places_of(state)
        found = RecurrentState(*held[0].shape, tuple(held[1].shape), CPU)
        found.load(0, (0, *held))
        out.copy_(mixed(net, [q, k, v, decay, gate, beta], found))
        for place, new in zip(to, (found.inputs, found.memory)):
            place.copy_(new)


REPLACED = (
    (step_delta, "StepDelta", Delta),
    (step_recurrent, "StepStateSpace", StateSpace),
    (step_recurrent, "StepKimiDelta", KimiDelta),
    (step_conv, "short_conv", short_conv),
)

"""State-space layers of Mamba-2 over many tokens, in chunks of CHUNK: `prompt/state_space.cu` for
one shape.

Sums, decays and the memory are float32. Factors of products are rounded to 10 bits, values and the
vectors that write and read to float16: like the results of `--precision f16`, they become infinite
above 65,504.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from ..step.state_space import StateSpaceShape
from .overlap import overlap
from .recurrent import CHUNK, SLICE, Buffer, launched_apart, parts_of, pitch, shared_limit
from .rows import HALVES, converted, short

_THREADS, _CONV_THREADS, _CONV_TOKENS, _NORM_THREADS = 256, 128, 16, 128
_MOST_STAGES = 2  # more copies in flight gain nothing
_FIXED = 2048  # bytes of shared memory that a kernel has besides, at most


@dataclass(frozen=True)
class StateSpaceWeights:
    """Small tensors of a layer: taps float32[channels, taps], the last for the current token, bias
    float32[channels]; dt, a and d float32[heads]; norm float32[groups, heads * length / groups],
    None for no norm, and its epsilon.
    """

    taps: torch.Tensor
    bias: torch.Tensor | None
    dt: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    norm: torch.Tensor | None
    eps: float


def shared_bytes(s: StateSpaceShape, stages: int) -> tuple[int, int]:
    """Return the bytes of shared memory that `chunks` and `results` ask for. stages: chunks that
    `chunks` has there at a time.
    """
    state, value = (-(-n // 16) * 16 for n in (s.state, s.length))
    # Two halves are in four bytes.
    b, c, x = pitch(state // 2, 8), pitch(state // 2, 4), pitch(value // 2, 8)
    chunks = stages * (CHUNK * b + _THREADS * 5) + 2 * CHUNK * pitch(SLICE, 8)
    results = CHUNK * (c + x + max(b, pitch(CHUNK, 4)) + pitch(value, 8))
    return 4 * chunks, 4 * results


def fitting_stages(s: StateSpaceShape, limit: int) -> int:
    """Return the chunks that are in shared memory at a time, 0 if not even one fits, or if there
    are no kernels for the shape. limit: bytes that a block can have.
    """
    usable = limit - _FIXED
    return next(
        (n for n in range(_MOST_STAGES, 0, -1) if s.fits and max(shared_bytes(s, n)) <= usable), 0
    )


@functools.cache
def state_space_spec(s: StateSpaceShape, half: torch.dtype, stages: int) -> KernelSpec:
    """Return the kernels of a shape, whose `rows` do not matter."""
    return KernelSpec(
        f"prompt_state_space_{short(half)}_{s.name}_{stages}",
        ("prompt/state_space.cu",),
        (("HALF", str(HALVES[half])), *s.defines, ("STAGES", str(stages))),
        ("convolved", "decays", "chunks", "results", "norm_groups"),
    )


class StateSpaceKernels:
    """The kernels of one shape on one device. ValueError if there is too little shared memory."""

    def __init__(self, shape: StateSpaceShape, half: torch.dtype, device: torch.device):
        self.shape = shape
        stages = fitting_stages(shape, shared_limit(device))
        if not stages:
            raise ValueError(f"no kernels for state-space layers of {shape} on {device}")
        spec = state_space_spec(shape, half, stages)
        self._chunks_shared, self._results_shared = shared_bytes(shape, stages)
        self._convolved, self._decays, self._chunks, self._results, self._norm = (
            function(spec, name, device) for name in spec.functions
        )

    def convolve(
        self,
        products: torch.Tensor,
        tokens: int,
        past: torch.Tensor | None,
        taps: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
    ) -> None:
        """Compute values x float16[sequences, heads, padded, length] and the vectors that write and
        read, b and c float16[sequences, groups, padded, state], from products half[sequences *
        tokens, ...]: convolution and SiLU. past float32[sequences, taps - 1, channels]: the inputs
        before them, None for zeros.
        """
        sequences, _, padded, _ = x.shape
        fours = taps.shape[0] // 4
        launch(
            self._convolved,
            (sequences * padded // _CONV_TOKENS, -(-fours // _CONV_THREADS)),
            _CONV_THREADS,
            products,
            np.int32(tokens),
            np.int32(padded),
            past,
            taps,
            bias,
            x,
            b,
            c,
            pdl=overlap(padded),
        )

    def decays(
        self,
        products: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        tokens: int,
        steps: torch.Tensor,
        until: torch.Tensor,
        totals: torch.Tensor,
    ) -> None:
        """Compute steps of time, these times the decay until the end of a chunk, float32[sequences
        * heads, padded], and the logarithms of decays since its begin, float64.
        """
        n_heads, padded = steps.shape
        launch(
            self._decays,
            (padded // CHUNK, n_heads),
            32,
            products,
            dt,
            a,
            np.int32(tokens),
            steps,
            until,
            totals,
            pdl=overlap(padded),
        )

    def chunks(
        self,
        x: torch.Tensor,
        b: torch.Tensor,
        until: torch.Tensor,
        totals: torch.Tensor,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None:
        """Take the memory through all chunks: states float32[sequences * heads, chunks, state,
        length] are the memory before every chunk. before, after: that before the first and after
        the last token.
        """
        n_heads, n_chunks = states.shape[:2]
        launch(
            self._chunks,
            (-(-self.shape.length // SLICE), n_heads),
            _THREADS,
            x,
            b,
            until,
            totals,
            np.int32(n_chunks),
            before,
            after,
            states,
            shared=self._chunks_shared,
            pdl=overlap(n_chunks * CHUNK),
        )

    def results(
        self,
        products: torch.Tensor,
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        steps: torch.Tensor,
        totals: torch.Tensor,
        d: torch.Tensor,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        """Compute out float32[sequences * tokens, heads * length]: what c reads, and d x, times
        silu of the gates in products.
        """
        n_heads, n_chunks = states.shape[:2]
        launch(
            self._results,
            (n_chunks, n_heads),
            _THREADS,
            products,
            x,
            b,
            c,
            states,
            steps,
            totals,
            d,
            np.int32(tokens),
            out,
            shared=self._results_shared,
            pdl=overlap(n_chunks * CHUNK),
        )

    def norm(self, y: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Compute out half[rows, heads * length]: RMS norms of the groups of y float32."""
        grid = (len(y), self.shape.groups)
        launch(
            self._norm,
            grid,
            _NORM_THREADS,
            y,
            weight,
            np.float32(eps),
            out,
            pdl=overlap(len(y)),
        )


def state_space(
    kernels: StateSpaceKernels,
    weights: StateSpaceWeights,
    products: torch.Tensor,
    n_sequences: int,
    past: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    out: torch.Tensor,
    buffer: Buffer,
) -> None:
    """Compute a layer between its products: out half[rows, heads * length] for products half[rows,
    ...] (gates, channels of the convolution, steps of time) of n_sequences of equal lengths. past:
    the inputs before, `before` and `after`: the memory before and after them.
    """
    s, w = kernels.shape, weights
    tokens = len(products) // n_sequences
    apart = list(launched_apart(n_sequences, s.heads, tokens))
    for n, sequences, rows in apart:
        kept = parts_of(sequences, past, before, after)
        state_space(kernels, weights, products[rows], n, *kept, out[rows], buffer)
    if apart:
        return
    n_chunks = -(-tokens // CHUNK)
    padded, n_heads = n_chunks * CHUNK, n_sequences * s.heads
    half, full = torch.float16, torch.float32

    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return buffer(f"state space {name}", shape, dtype)

    x = of("values", (n_sequences, s.heads, padded, s.length), half)
    b, c = (of(name, (n_sequences, s.groups, padded, s.state), half) for name in ("b", "c"))
    steps, until = (of(name, (n_heads, padded), full) for name in ("steps", "until"))
    totals = of("totals", (n_heads, padded), torch.float64)
    states = of("states", (n_heads, n_chunks, s.state, s.length), full)
    gated = of("results", (len(products), s.heads * s.length), full)
    kernels.convolve(products, tokens, past, w.taps, w.bias, x, b, c)
    kernels.decays(products, w.dt, w.a, tokens, steps, until, totals)
    kernels.chunks(x, b, until, totals, before, after, states)
    kernels.results(products, x, b, c, states, steps, totals, w.d, tokens, gated)
    if w.norm is None:
        converted(gated, out)
    else:
        kernels.norm(gated, w.norm, w.eps, out)


def specs() -> list[KernelSpec]:
    """Return the shape of Nemotron 3 Nano, and a small one. Others are compiled on first use."""
    nano, small = StateSpaceShape(1, 64, 8, 64, 128, 4), StateSpaceShape(1, 4, 2, 12, 20, 3)
    return [
        *(state_space_spec(nano, half, _MOST_STAGES) for half in HALVES),
        state_space_spec(nano, torch.bfloat16, 1),
        state_space_spec(small, torch.float16, 2),
    ]

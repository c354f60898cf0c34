"""Gated delta nets over many tokens, in chunks of CHUNK: `prompt/delta.cu` for one shape.

Between the products of the layer everything is float32, but factors of products are rounded to the
10 bits of TF32, whose errors are below those of the inputs, which are rounded to a half. Those that
are no longer than 1 are stored in float16.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import launch
from ..compile.spec import KernelSpec
from .delta_chunks import (
    HALVES,
    SHORT,
    THREADS,
    ChunkBuffers,
    ChunkKernels,
    DeltaWeights,
    SharedBytes,
)
from .overlap import overlap
from .recurrent import CHUNK, Buffer, launched_apart, parts_of, shared_limit

MOST_LENGTH = 256
_FIXED = 1024  # bytes of shared memory that a kernel has besides, at most: those of `solve`


def fitting_stages(heads: DeltaHeads, limit: int) -> int:
    """Return the chunks that are in shared memory at a time, 0 if not even one fits.

    limit: bytes that a block can have (`shared_limit`).
    """
    lengths = (heads.key_length, heads.value_length)
    if any(length % 4 or length > MOST_LENGTH for length in lengths) or heads.taps < 2:
        return 0
    usable = limit - _FIXED
    return next((n for n in (2, 1) if max(SharedBytes.of(heads, n)) <= usable), 0)


@functools.cache
def delta_spec(heads: DeltaHeads, half: torch.dtype, stages: int) -> KernelSpec:
    """Return the kernels of delta nets, `stages` chunks in shared memory at a time."""
    return KernelSpec(
        f"prompt_delta_{SHORT[half]}_{heads.name}_{heads.taps}_{stages}{heads.layout}",
        ("prompt/delta.cu",),
        (("HALF", str(HALVES[half])), *heads.defines, ("STAGES", str(stages))),
        ("heads", "solve", "chunks", "results"),
    )


class DeltaKernels(ChunkKernels):
    """The kernels of one shape on one device. ValueError if there is too little shared memory."""

    def __init__(self, heads: DeltaHeads, half: torch.dtype, device: torch.device):
        stages = fitting_stages(heads, shared_limit(device))
        if not stages:
            raise ValueError(f"no kernels for delta nets of {heads} on {device}")
        spec = delta_spec(heads, half, stages)
        super().__init__(heads, spec, SharedBytes.of(heads, stages), device)

    def solve(
        self,
        rates: torch.Tensor,
        tokens: int,
        dt: torch.Tensor,
        a: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        values: torch.Tensor,
        keys: torch.Tensor,
        qk: torch.Tensor,
        since: torch.Tensor,
        until: torch.Tensor,
    ) -> None:
        """Compute what chunks need of each other's rows: see the source. rates float32[sequences *
        tokens, 2 * value_heads]; q, k and v as `split` leaves them; values of the shape of v, keys
        float16[sequences, value_heads, padded, key_length]; qk float16[sequences * value_heads,
        chunks, CHUNK, CHUNK]; since and until float32[sequences * value_heads, padded].
        """
        n_heads, n_chunks = qk.shape[:2]
        launch(
            self._solve,
            (n_chunks, n_heads),
            THREADS,
            rates,
            dt,
            a,
            np.int32(tokens),
            q,
            k,
            v,
            values,
            keys,
            qk,
            since,
            until,
            shared=self._shared.solve,
            pdl=overlap(n_chunks * CHUNK),
        )


def delta_rule(
    kernels: DeltaKernels,
    weights: DeltaWeights,
    products: torch.Tensor,
    z: torch.Tensor,
    rates: torch.Tensor,
    n_sequences: int,
    past: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    out: torch.Tensor,
    buffer: Buffer,
) -> None:
    """Compute a delta net between its products: out half[rows, value_heads * value_length] for
    products and z half[rows, ...] and rates float32[rows, 2 * value_heads] of n_sequences of equal
    lengths. past: the inputs before, `before` and `after`: the memory before and after them.
    """
    s = kernels.heads
    tokens = len(products) // n_sequences
    apart = list(launched_apart(n_sequences, 2 * s.key_heads + s.value_heads, tokens))
    for n, sequences, rows in apart:
        kept, x = parts_of(sequences, past, before, after), (products[rows], z[rows], rates[rows])
        delta_rule(kernels, weights, *x, n, *kept, out[rows], buffer)
    if apart:
        return
    b, w = ChunkBuffers.of(s, n_sequences, tokens, buffer), weights
    n_heads, n_chunks = b.states.shape[:2]
    since, until = (
        buffer(f"delta {name}", (n_heads, n_chunks * CHUNK), torch.float32)
        for name in ("since", "until")
    )
    kernels.split(products, tokens, past, w.taps, b.q, b.k, b.v)
    kernels.solve(rates, tokens, w.dt, w.a, b.q, b.k, b.v, b.values, b.keys, b.qk, since, until)
    kernels.chunks(b.values, b.keys, b.k, since, until, before, after, b.states)
    kernels.results(b.q, b.states, b.qk, b.values, since, z, w.norm, w.eps, tokens, out)


def specs() -> list[KernelSpec]:
    """Return the shape of Qwen3.5-35B-A3B, and a small one. Others are compiled on first use."""
    large, small = (
        DeltaHeads(16, 32, 128, 128, 4, True, False),
        DeltaHeads(2, 4, 20, 12, 3, False, True),
    )
    return [
        *(delta_spec(large, half, 2) for half in HALVES),
        delta_spec(large, torch.bfloat16, 1),
        delta_spec(small, torch.float16, 2),
    ]

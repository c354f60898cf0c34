"""Gated delta nets over many tokens, in chunks of CHUNK: `prompt/delta.cu` for one shape.

Between the products of the layer everything is float32, but factors of products are rounded to the
10 bits of TF32, whose errors are below those of the inputs, which are rounded to a half. Those that
are no longer than 1 are stored in float16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .recurrent import CHUNK, SLICE, Buffer, launched_apart, parts_of, pitch, shared_limit

_THREADS, _HEAD_TOKENS, _HEAD_THREADS = 256, 32, 128
_HALVES = {torch.bfloat16: 0, torch.float16: 1}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}
MOST_LENGTH = 256
_FIXED = 1024  # bytes of shared memory that a kernel has besides, at most: those of `solve`


class SharedBytes(NamedTuple):
    """Bytes of shared memory of the kernels that ask for it when they are launched."""

    solve: int
    chunks: int
    results: int

    @classmethod
    def of(cls, heads: DeltaHeads, stages: int) -> SharedBytes:
        """stages: chunks that `chunks` has there at a time."""
        key, value = (-(-n // 16) * 16 for n in (heads.key_length, heads.value_length))
        by_key, by_value = pitch(key // 2, 8), pitch(value, 8)  # two keys are in four bytes
        tiles = stages * 2 * CHUNK * by_key
        return cls(
            4 * CHUNK * (by_key + max(by_key, by_value) + pitch(CHUNK, 4)),
            4 * (tiles + SLICE * pitch(-(-key // 32) * 32, 16) + CHUNK * pitch(SLICE, 8)),
            4 * CHUNK * (pitch(CHUNK // 2, 4) + by_value),
        )


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
        f"prompt_delta_{_SHORT[half]}_{heads.name}_{heads.taps}_{stages}{heads.layout}",
        ("prompt/delta.cu",),
        (("HALF", str(_HALVES[half])), *heads.defines, ("STAGES", str(stages))),
        ("heads", "solve", "chunks", "results"),
    )


class DeltaKernels:
    """The kernels of one shape on one device. ValueError if there is too little shared memory."""

    def __init__(self, heads: DeltaHeads, half: torch.dtype, device: torch.device):
        self.heads, self.stages = heads, fitting_stages(heads, shared_limit(device))
        if not self.stages:
            raise ValueError(f"no kernels for delta nets of {heads} on {device}")
        spec = delta_spec(heads, half, self.stages)
        self._shared = SharedBytes.of(heads, self.stages)
        self._heads, self._solve, self._chunks, self._results = (
            function(spec, name, device) for name in spec.functions
        )

    def split(
        self,
        products: torch.Tensor,
        tokens: int,
        past: torch.Tensor | None,
        taps: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Compute queries and keys of length 1, queries times key_length^-0.5, float16[sequences,
        key_heads, padded, key_length], and values float32[sequences, value_heads, padded,
        value_length], rounded to TF32, from products half[sequences * tokens, ...] (rows may be
        further apart): convolution and SiLU. past float32[sequences, taps - 1, channels]: the
        inputs before them, None for zeros.
        """
        s, (sequences, _, padded, _) = self.heads, q.shape
        launch(
            self._heads,
            (padded // _HEAD_TOKENS, sequences * (2 * s.key_heads + s.value_heads)),
            _HEAD_THREADS,
            products,
            np.int32(products.stride(0)),
            np.int32(tokens),
            np.int32(padded),
            past,
            taps,
            q,
            k,
            v,
        )

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
            _THREADS,
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
        )

    def chunks(
        self,
        values: torch.Tensor,
        keys: torch.Tensor,
        k: torch.Tensor,
        since: torch.Tensor,
        until: torch.Tensor,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None:
        """Take the memory through all chunks: values become errors, and states
        float32[sequences * value_heads, chunks, key_length, value_length] the memory before every
        chunk. before, after: the memory before the first and after the last token.
        """
        n_heads, n_chunks = states.shape[:2]
        launch(
            self._chunks,
            (-(-self.heads.value_length // SLICE), n_heads),
            _THREADS,
            values,
            keys,
            k,
            since,
            until,
            np.int32(n_chunks),
            before,
            after,
            states,
            shared=self._shared.chunks,
        )

    def results(
        self,
        q: torch.Tensor,
        states: torch.Tensor,
        qk: torch.Tensor,
        errors: torch.Tensor,
        since: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        """Compute out half[sequences * tokens, value_heads * value_length] = norm(since * (q
        states) + qk errors) * silu(z); rows of z, half[sequences * tokens, ...], may be further
        apart.
        """
        n_heads, n_chunks = states.shape[:2]
        launch(
            self._results,
            (n_chunks, n_heads),
            _THREADS,
            q,
            states,
            qk,
            errors,
            since,
            z,
            np.int32(z.stride(0)),
            weight,
            np.float32(eps),
            np.int32(tokens),
            out,
            shared=self._shared.results,
        )


def rates_product(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out float32[rows, n] = x weights^T for half[rows, width] and half[n, width]."""
    out.copy_(torch.mm(x, weights.t(), out_dtype=torch.float32))


@dataclass(frozen=True)
class DeltaWeights:
    """Small tensors of a layer: taps float32[channels, taps], dt and a float32[value_heads], the
    norm of each head float32[value_length] and its epsilon.
    """

    taps: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    norm: torch.Tensor
    eps: float


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
    n_chunks = -(-tokens // CHUNK)
    padded, n_heads = n_chunks * CHUNK, n_sequences * s.value_heads

    def of_tokens(name: str, heads: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer(f"delta {name}", (n_sequences, heads, padded, length), dtype)

    half, full = torch.float16, torch.float32
    q, k = (of_tokens(name, s.key_heads, s.key_length, half) for name in ("q", "k"))
    v, values = (of_tokens(name, s.value_heads, s.value_length, full) for name in ("v", "values"))
    keys = of_tokens("keys", s.value_heads, s.key_length, half)
    qk = buffer("delta qk", (n_heads, n_chunks, CHUNK, CHUNK), half)
    since, until = (buffer(f"delta {name}", (n_heads, padded), full) for name in ("since", "until"))
    states = buffer("delta states", (n_heads, n_chunks, s.key_length, s.value_length), full)
    w = weights
    kernels.split(products, tokens, past, w.taps, q, k, v)
    kernels.solve(rates, tokens, w.dt, w.a, q, k, v, values, keys, qk, since, until)
    kernels.chunks(values, keys, k, since, until, before, after, states)
    kernels.results(q, states, qk, values, since, z, w.norm, w.eps, tokens, out)


def specs() -> list[KernelSpec]:
    """Return the shape of Qwen3.5-35B-A3B, and a small one. Others are compiled on first use."""
    large, small = (
        DeltaHeads(16, 32, 128, 128, 4, True, False),
        DeltaHeads(2, 4, 20, 12, 3, False, True),
    )
    return [
        *(delta_spec(large, half, 2) for half in _HALVES),
        delta_spec(large, torch.bfloat16, 1),
        delta_spec(small, torch.float16, 2),
    ]

"""Gated delta nets over many tokens: `prompt/delta.cu` for one shape, and the products between its
kernels.

Everything between the products of the layer is float32 (no TF32), in chunks of CHUNK tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec

CHUNK, SLICE = 64, 32
_SLICE_THREADS, _HEAD_TOKENS, _HEAD_THREADS, _GATED_TOKENS = 256, 32, 128, 8
_HALVES = {torch.bfloat16: 0, torch.float16: 1}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}
MOST_LENGTH = 256

# Memory by name: float32 of a shape, whose content need not be kept.
Buffer = Callable[[str, tuple[int, ...]], torch.Tensor]


def shared_bytes(heads: DeltaHeads, stages: int) -> int:
    """Return the bytes of shared memory of `chunks`."""
    tiles = stages * 2 * CHUNK * (heads.key_length + 4)
    return 4 * (tiles + SLICE * (heads.key_length + CHUNK))


def fitting_stages(heads: DeltaHeads, limit: int) -> int:
    """Return the chunks that are in shared memory at a time, 0 if not even one fits."""
    lengths = (heads.key_length, heads.value_length)
    if any(length % 4 or length > MOST_LENGTH for length in lengths) or heads.taps < 2:
        return 0
    return next((n for n in (2, 1) if shared_bytes(heads, n) <= limit), 0)


@functools.cache
def delta_spec(heads: DeltaHeads, half: torch.dtype, stages: int) -> KernelSpec:
    """Return the kernels of delta nets, `stages` chunks in shared memory at a time."""
    return KernelSpec(
        f"prompt_delta_{_SHORT[half]}_{heads.name}_{heads.taps}_{stages}{heads.layout}",
        ("prompt/delta.cu",),
        (("HALF", str(_HALVES[half])), *heads.defines, ("STAGES", str(stages))),
        ("heads", "solve", "chunks", "gated"),
    )


class DeltaKernels:
    """The kernels of one shape on one device. ValueError if there is too little shared memory."""

    def __init__(self, heads: DeltaHeads, half: torch.dtype, device: torch.device):
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        self.heads, self.stages = heads, fitting_stages(heads, limit)
        if not self.stages:
            raise ValueError(f"no kernels for delta nets of {heads} on {device}")
        spec = delta_spec(heads, half, self.stages)
        self._heads, self._solve, self._chunks, self._gated = (
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
        """Compute queries and keys of length 1, queries times key_length^-0.5, and values of all
        value heads, float32[sequences, value_heads, padded, length], from products half[sequences *
        tokens, ...] (rows may be further apart): convolution and SiLU. past float32[sequences,
        taps - 1, channels]: the inputs before them, None for zeros.
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
        kk: torch.Tensor,
        qk: torch.Tensor,
        scaled_keys: torch.Tensor,
        since: torch.Tensor,
        until: torch.Tensor,
    ) -> None:
        """Invert the triangles of all chunks: see the source. rates float32[sequences * tokens, 2 *
        value_heads]; kk, qk and scaled_keys float32[sequences * value_heads, chunks, CHUNK, CHUNK];
        since and until float32[sequences * value_heads, padded].
        """
        n_heads, n_chunks = kk.shape[:2]
        launch(
            self._solve,
            (n_chunks, n_heads),
            CHUNK,
            rates,
            dt,
            a,
            np.int32(tokens),
            kk,
            qk,
            scaled_keys,
            since,
            until,
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
            _SLICE_THREADS,
            values,
            keys,
            k,
            since,
            until,
            np.int32(n_chunks),
            before,
            after,
            states,
            shared=shared_bytes(self.heads, self.stages),
        )

    def gated(
        self,
        remembered: torch.Tensor,
        seen: torch.Tensor,
        since: torch.Tensor,
        z: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        """Compute out half[sequences * tokens, value_heads * value_length] = norm(since *
        remembered + seen) * silu(z) for float32[sequences, value_heads, padded, value_length]; rows
        of z, half[sequences * tokens, ...], may be further apart.
        """
        sequences, n_heads, padded = seen.shape[:3]
        launch(
            self._gated,
            (-(-tokens // _GATED_TOKENS), sequences * n_heads),
            32 * _GATED_TOKENS,
            remembered,
            seen,
            since,
            z,
            np.int32(z.stride(0)),
            weight,
            np.float32(eps),
            np.int32(tokens),
            np.int32(padded),
            out,
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
    n_chunks = -(-tokens // CHUNK)
    padded, n_heads = n_chunks * CHUNK, n_sequences * s.value_heads
    by_key, by_value = (
        (n_sequences, s.value_heads, padded, length) for length in (s.key_length, s.value_length)
    )
    q, k, keys = (buffer(f"delta {name}", by_key) for name in ("q", "k", "keys"))
    v, values = (buffer(f"delta {name}", by_value) for name in ("v", "values"))
    square = (n_heads, n_chunks, CHUNK, CHUNK)
    kk, qk, scaled = (buffer(f"delta {name}", square) for name in ("kk", "qk", "scaled keys"))
    since, until = (buffer(f"delta {name}", (n_heads, padded)) for name in ("since", "until"))
    states = buffer("delta states", (n_heads, n_chunks, s.key_length, s.value_length))

    def by_chunk(x: torch.Tensor) -> torch.Tensor:
        return x.view(n_heads * n_chunks, -1, x.shape[-1])

    kernels.split(products, tokens, past, weights.taps, q, k, v)
    of_q, of_k, of_v = by_chunk(q), by_chunk(k), by_chunk(v)
    torch.bmm(of_k, of_k.mT, out=by_chunk(kk))
    torch.bmm(of_q, of_k.mT, out=by_chunk(qk))
    kernels.solve(rates, tokens, weights.dt, weights.a, kk, qk, scaled, since, until)
    torch.bmm(by_chunk(kk), of_v, out=by_chunk(values))
    torch.bmm(by_chunk(scaled), of_k, out=by_chunk(keys))
    kernels.chunks(values, keys, k, since, until, before, after, states)
    # Neither keys nor values are needed any more.
    remembered = buffer("delta keys", by_value)
    torch.bmm(of_q, by_chunk(states), out=by_chunk(remembered))
    torch.bmm(by_chunk(qk), by_chunk(values), out=of_v)
    kernels.gated(remembered, v, since, z, weights.norm, weights.eps, tokens, out)


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

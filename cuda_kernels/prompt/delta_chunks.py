"""What delta nets with one decay for a head (`delta.py`) and with one for every channel
(`kimi_delta.py`) have in common over many tokens: three of their four kernels, and what these leave
for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import function, launch
from ..compile.spec import KernelSpec
from .overlap import overlap
from .recurrent import CHUNK, SLICE, Buffer, pitch

THREADS, _HEAD_TOKENS, _HEAD_THREADS = 256, 32, 128
HALVES = {torch.bfloat16: 0, torch.float16: 1}
SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}


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


class ChunkKernels:
    """What layers with one decay for a head and those with one for every channel have in common:
    the kernels of a spec whose functions are `heads`, `solve`, `chunks` and `results`.
    """

    def __init__(
        self, heads: DeltaHeads, spec: KernelSpec, shared: SharedBytes, device: torch.device
    ):
        self.heads, self._shared = heads, shared
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
            pdl=overlap(padded),
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
            THREADS,
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
            pdl=overlap(n_chunks * CHUNK),
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
            THREADS,
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
            pdl=overlap(n_chunks * CHUNK),
        )


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


class ChunkBuffers(NamedTuple):
    """What kernels leave for each other, of all chunks; shapes are those of `ChunkKernels`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    values: torch.Tensor
    keys: torch.Tensor
    qk: torch.Tensor
    states: torch.Tensor

    @classmethod
    def of(cls, s: DeltaHeads, n_sequences: int, tokens: int, buffer: Buffer) -> ChunkBuffers:
        """Return buffers for sequences of equal lengths."""
        n_chunks, half, full = -(-tokens // CHUNK), torch.float16, torch.float32
        n_heads = n_sequences * s.value_heads

        def of_tokens(name: str, heads: int, length: int, dtype: torch.dtype) -> torch.Tensor:
            shape = n_sequences, heads, n_chunks * CHUNK, length
            return buffer(f"delta {name}", shape, dtype)

        return cls(
            of_tokens("q", s.key_heads, s.key_length, half),
            of_tokens("k", s.key_heads, s.key_length, half),
            of_tokens("v", s.value_heads, s.value_length, full),
            of_tokens("values", s.value_heads, s.value_length, full),
            of_tokens("keys", s.value_heads, s.key_length, half),
            buffer("delta qk", (n_heads, n_chunks, CHUNK, CHUNK), half),
            buffer("delta states", (n_heads, n_chunks, s.key_length, s.value_length), full),
        )


def rates_product(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out float32[rows, n] = x weights^T for half[rows, width] and half[n, width]."""
    out.copy_(torch.mm(x, weights.t(), out_dtype=torch.float32))

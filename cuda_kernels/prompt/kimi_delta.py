"""Kimi delta attention over many tokens, in chunks of CHUNK: `prompt/kimi_delta.cu` for one shape.

Three of its four kernels are those of delta nets (`delta.py`), and so are precisions.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..common.delta_heads import DeltaHeads
from ..compile.launch import launch
from ..compile.spec import KernelSpec
from .delta import MOST_LENGTH
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
from .recurrent import CHUNK, Buffer, launched_apart, parts_of, pitch, shared_limit

_PART, _PARTS = 16, 4  # tokens of a part of a chunk, and parts


def shared_bytes(heads: DeltaHeads, stages: int) -> SharedBytes:
    """Return the bytes that kernels ask for when they are launched."""
    key, value = (-(-n // 16) * 16 for n in (heads.key_length, heads.value_length))
    tile = CHUNK * pitch(key // 2, 8)
    last = max(tile + CHUNK * key, CHUNK * pitch(value, 8))
    solve = max(tile, CHUNK * pitch(CHUNK, 4)) + tile + last + _PARTS * _PART * _PART
    return SharedBytes.of(heads, stages)._replace(solve=4 * solve)


def fitting_stages(heads: DeltaHeads, limit: int) -> int:
    """Return the chunks that are in shared memory at a time, 0 if not even one fits.

    limit: bytes that a block can have (`shared_limit`).
    """
    length = heads.key_length
    if length % 4 or length > MOST_LENGTH or heads.value_length != length or heads.taps < 2:
        return 0
    fixed = 1024 + 4 * (CHUNK + _PARTS * -(-length // 16) * 16)  # what `solve` has besides
    return next((n for n in (2, 1) if max(shared_bytes(heads, n)) <= limit - fixed), 0)


@functools.cache
def kimi_delta_spec(
    heads: DeltaHeads, half: torch.dtype, stages: int, bound: float = 0.0
) -> KernelSpec:
    """Return the kernels of Kimi delta attention, `stages` chunks in shared memory at a time.
    bound: below 0, the least logarithm of a decay.
    """
    bound = float(np.float32(bound))
    above = f"_above_{-bound:g}".replace(".", "_") if bound else ""
    return KernelSpec(
        f"prompt_kimi_delta_{SHORT[half]}_{heads.name}_{heads.taps}_{stages}{above}",
        ("prompt/kimi_delta.cu",),
        (
            ("HALF", str(HALVES[half])),
            *heads.defines,
            ("STAGES", str(stages)),
            ("BOUND", f"({bound!r}f)"),
        ),
        ("heads", "solve", "chunks", "results"),
    )


class KimiDeltaKernels(ChunkKernels):
    """The kernels of one shape on one device. ValueError if there is too little shared memory."""

    def __init__(
        self, heads: DeltaHeads, half: torch.dtype, device: torch.device, bound: float = 0.0
    ):
        stages = fitting_stages(heads, shared_limit(device))
        if not stages:
            raise ValueError(f"no kernels for Kimi delta attention of {heads} on {device}")
        spec = kimi_delta_spec(heads, half, stages, bound)
        super().__init__(heads, spec, shared_bytes(heads, stages), device)

    def solve(
        self,
        decay: torch.Tensor,
        rates: torch.Tensor,
        tokens: int,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: ChunkBuffers,
        whole: torch.Tensor,
    ) -> None:
        """Compute what chunks need of each other's rows: see the source. decay half[sequences *
        tokens, heads * length], of rows that may be further apart; rates float32[sequences *
        tokens, heads]; b: q, k and v as `split` leaves them; whole float32[sequences * heads,
        chunks, length].
        """
        n_heads, n_chunks = whole.shape[:2]
        launch(
            self._solve,
            (n_chunks, n_heads),
            THREADS,
            decay,
            np.int32(decay.stride(0)),
            rates,
            dt,
            a,
            np.int32(tokens),
            *(b.q, b.k, b.v, b.values, b.keys, b.qk),
            whole,
            shared=self._shared.solve,
            pdl=overlap(n_chunks * CHUNK),
        )


def kimi_delta_rule(
    kernels: KimiDeltaKernels,
    weights: DeltaWeights,
    products: torch.Tensor,
    decay: torch.Tensor,
    z: torch.Tensor,
    rates: torch.Tensor,
    n_sequences: int,
    past: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    out: torch.Tensor,
    buffer: Buffer,
) -> None:
    """Compute Kimi delta attention between its products: out half[rows, heads * length] for
    products half[rows, ...], which begin with queries, keys and values, decay and z half[rows,
    heads * length] and rates float32[rows, heads] of n_sequences of equal lengths. dt of the
    weights has an element for each channel. past: the inputs before, `before` and `after`: the
    memory before and after them.
    """
    s, w = kernels.heads, weights
    tokens = len(products) // n_sequences
    apart = list(launched_apart(n_sequences, 3 * s.value_heads, tokens))
    for n, sequences, rows in apart:
        kept = parts_of(sequences, past, before, after)
        x = products[rows], decay[rows], z[rows], rates[rows]
        kimi_delta_rule(kernels, w, *x, n, *kept, out[rows], buffer)
    if apart:
        return
    b = ChunkBuffers.of(s, n_sequences, tokens, buffer)
    whole = buffer("delta whole", (*b.states.shape[:2], s.key_length), torch.float32)
    kernels.split(products, tokens, past, w.taps, b.q, b.k, b.v)
    kernels.solve(decay, rates, tokens, w.dt, w.a, b, whole)
    kernels.chunks(b.values, b.keys, b.k, whole, whole, before, after, b.states)
    kernels.results(b.q, b.states, b.qk, b.values, whole, z, w.norm, w.eps, tokens, out)


def specs() -> list[KernelSpec]:
    """Return the shape of Kimi-Linear-48B-A3B, and a small one. Others are compiled on first
    use.
    """
    large, small = (
        DeltaHeads(n, n, length, length, 4, True, False) for n, length in ((32, 128), (3, 20))
    )
    return [
        *(kimi_delta_spec(large, half, 2) for half in HALVES),
        kimi_delta_spec(large, torch.bfloat16, 1),
        kimi_delta_spec(large, torch.bfloat16, 2, -5.0),
        kimi_delta_spec(small, torch.float16, 2),
    ]

"""Kernels of delta nets over many tokens, compiled by g++."""

from __future__ import annotations

import ctypes

import torch

from .kernels_on_host import pointer


def nans(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody has written."""
    return torch.full(shape, float("nan"), dtype=dtype)


class HostChunkKernels:
    """`ChunkKernels` of a library."""

    def __init__(self, heads, library):
        self.heads, self.library = heads, library

    def split(self, products, tokens, past, taps, q, k, v):
        sequences, _, padded, _ = q.shape
        self.library.run_heads(
            pointer(products),
            products.stride(0),
            tokens,
            padded,
            *map(pointer, (past, taps, q, k, v)),
            sequences,
        )

    def chunks(self, values, keys, k, since, until, before, after, states):
        n_heads, n_chunks = states.shape[:2]
        self.library.run_chunks(
            *map(pointer, (values, keys, k, since, until)),
            n_chunks,
            *map(pointer, (before, after, states)),
            n_heads,
        )

    def results(self, q, states, qk, errors, since, z, weight, eps, tokens, out):
        n_heads, n_chunks = states.shape[:2]
        self.library.run_results(
            *map(pointer, (q, states, qk, errors, since, z)),
            z.stride(0),
            pointer(weight),
            ctypes.c_float(eps),
            tokens,
            pointer(out),
            n_chunks,
            n_heads,
        )

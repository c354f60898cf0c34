"""Caches that attention of prompts cannot read as they are: kernels encode and decode rows of
quantized types where the positions of a sequence follow each other.
"""

from __future__ import annotations

import torch

from ....cuda_kernels.prompt import cached as prompt_cached
from ...state.cache import KVCache
from ...state.cache_tiles import RowLayout
from .context import Context
from .executor import operation


def store(cache: KVCache, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v, contiguous float32[n, heads, length], at positions from `first`."""
    if not _has_kernels(cache):
        cache.write(first, k, v)
        return
    for type, held, block, x in (
        (cache.type_k, cache.k, cache.hadamard_k, k),
        (cache.type_v, cache.v, cache.hadamard_v, v),
    ):
        if type.is_quantized:
            operation(prompt_cached.store_rows, x, held, first, type.name, block, _alone(cache))
        else:
            held[first : first + len(x)].copy_(x)


def load(
    cache: KVCache, stop: int, first: int, context: Context | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of positions first..stop, float16[n, heads, length], as stored; in
    buffers of `context`, without one in new memory.
    """
    if not _has_kernels(cache):
        k, v = cache.read(stop, first)
        return k.half(), v.half()
    found = []
    for name, type, held, length in (
        ("keys", cache.type_k, cache.k, cache.key_length),
        ("values", cache.type_v, cache.v, cache.value_length),
    ):
        if not type.is_quantized:
            found.append(held[first:stop].half())
            continue
        n, heads = stop - first, held.shape[1]
        if context is None:
            out = torch.empty(n, heads, length, dtype=torch.float16, device=held.device)
        else:  # as large as it can become: graphs of prompts end where a buffer grows
            shape = (cache.capacity, heads, length)
            out = context.buffer(f"decoded {name}", shape, torch.float16)[:n]
        operation(prompt_cached.read_rows, held, out, first, type.name, _alone(cache))
        found.append(out)
    return found[0], found[1]


def _has_kernels(cache: KVCache) -> bool:
    return cache.is_whole and cache.storage.layout is not RowLayout.BLOCKS


def _alone(cache: KVCache) -> bool:
    return cache.storage.layout is RowLayout.FIELDS

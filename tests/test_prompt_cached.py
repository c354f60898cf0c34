"""Quantized caches of prompts: kernels compiled by g++, and what stores and loads with them."""

from __future__ import annotations

import ctypes

import pytest
import torch
from iqforge.cuda_kernels.prompt import cached as prompt_cached
from iqforge.errors import ShapeError
from iqforge.runtime.cuda.common import cached
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.state.cache import CacheSettings, KVCache
from iqforge.runtime.state.cache_tiles import RowLayout
from iqforge.runtime.state.cache_types import CACHE_TYPES

from .kernels_on_host import library, pointer

CPU = torch.device("cpu")
QUANTIZED = [name for name, type in CACHE_TYPES.items() if type.is_quantized]
RUN = """
extern "C" void store(int blocks, const float* x, u8* cache, int first, int heads, int rows) {
    launch_on_host(blocks, 1, 32 * WARPS, [&] { store_rows(x, cache, first, heads, rows); });
}
extern "C" void read(int blocks, const u8* cache, uint4* out, int first, int heads, long long n) {
    launch_on_host(blocks, 1, 256, [&] { read_rows(cache, out, first, heads, n); });
}
"""


@pytest.fixture
def on_host(monkeypatch, tmp_path):
    """Replace launches by calls of kernels that g++ compiles."""

    def function(spec, name, device):
        folder = tmp_path / f"{spec.name}_{name}"
        folder.mkdir(exist_ok=True)
        return getattr(library(folder, spec, RUN), name.removesuffix("_rows"))

    def launch(kernel, blocks, threads, first, second, *numbers, pdl):
        kinds = {"int32": ctypes.c_int, "int64": ctypes.c_longlong}
        sizes = [kinds[str(n.dtype)](int(n)) for n in numbers]
        assert type(blocks) is int
        kernel(blocks, pointer(first), pointer(second), *sizes)

    monkeypatch.setattr(prompt_cached, "function", function)
    monkeypatch.setattr(prompt_cached, "launch", launch)


def draw(n: int, heads: int, length: int, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, length, generator=torch.Generator().manual_seed(seed))


def both(
    length: int, settings: CacheSettings, layout: RowLayout = RowLayout.TILES
) -> list[KVCache]:
    return [
        KVCache.alone(256, 2, length, length, settings, CPU, way)
        for way in (layout, RowLayout.BLOCKS)
    ]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("q8_0", "q8_kv", "q5_1", "iq4_nl")  # one of each kind
        else pytest.param(name, marks=pytest.mark.full)
        for name in QUANTIZED
    ],
)
@pytest.mark.parametrize("layout", [RowLayout.TILES, RowLayout.FIELDS])
def test_kernels_store_and_load_what_torch_does(name, layout, on_host):
    length = 96 if name == "q8_0" else 64
    cache, wanted = both(length, CacheSettings(name, "q8_0" if name == "q8_kv" else name), layout)
    k, v = draw(29, 2, length, 1), draw(29, 2, length, 2)  # parts of three tiles
    k[1, 1], v[2, 0, :32] = 0, 1e7  # without a scale, and with the largest
    wanted.write(7, k, v)
    assert cached._has_kernels(cache)
    cached.store(cache, 7, k, v)
    for stored, expected in zip(cache.save(0, 48), wanted.save(0, 48), strict=True):
        assert torch.equal(stored, expected)
    context = Context(CPU)
    for way in (None, context):
        found = cached.load(cache, 36, 8, way)
        for x, expected in zip(found, wanted.read(36, 8), strict=True):
            assert x.dtype == torch.float16 and torch.equal(x, expected.half())
    cached.load(cache, 256, 0, context)
    assert not context.growths, "graphs of prompts would be captured again in every pass"


def test_turned_keys_beside_floats(on_host):
    cache, wanted = both(64, CacheSettings("q8_0", "bf16", hadamard_k=True))
    k, v = draw(9, 2, 64, 1), draw(9, 2, 64, 2)
    wanted.write(0, k, v)
    cached.store(cache, 0, k, v)
    found, expected = cached.load(cache, 9, 0, None), wanted.read(9)
    # Sums of the transform are rounded in another order.
    assert (found[0].float() == expected[0].half().float()).double().mean() > 0.99
    assert (found[0].float() - expected[0]).abs().max() < 0.05
    assert torch.equal(found[1].float(), expected[1])


def test_other_caches_are_written_and_read_as_on_the_reference_path(monkeypatch):
    monkeypatch.setattr(prompt_cached, "launch", None)
    _, cache = both(64, CacheSettings("q8_0", "q4_0"))
    cached.store(cache, 3, draw(4, 2, 64, 1), draw(4, 2, 64, 2))
    k, v = cached.load(cache, 7, 3, Context(CPU))
    assert torch.equal(k.float(), cache.read(7, 3)[0].half().float()) and v.dtype == torch.float16


def test_rows_of_another_size():
    rows = torch.zeros(3, 2, 64)
    with pytest.raises(ShapeError, match=r"expected contiguous bytes \[2 or more, 2, 1088\]"):
        prompt_cached.store_rows(rows, torch.zeros(1, 2, 1088, dtype=torch.uint8), 14, "Q8_0")

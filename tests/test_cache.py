"""Continued sequences have the logits of a single pass, for every split into calls and every type
of cache.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import ShapeError, UsageError
from iqforge.formats.codecs import codec
from iqforge.formats.types import ggml_type
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings, KVCache
from iqforge.runtime.state.cache_tiles import TILE, RowLayout
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.state.hadamard import hadamard, hadamard_block
from iqforge.runtime.state.table import BLOCK_TOKENS

from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

CPU = torch.device("cpu")

TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 30).tolist()]
QUANTIZED = [name for name, type in CACHE_TYPES.items() if type.is_quantized]
# Error of logits, relative to their size, that a cache of this type may make on the models below
# (in the median of positions).
TOLERANCE = {
    "f32": 1e-5,
    "f16": 1e-3,
    "bf16": 6e-3,
    "q8_0": 4e-2,
    "q8_kv": 2e-2,
    "q6_0": 8e-2,
    "q5_1": 0.16,
    "q5_0": 0.16,
    "q4_1": 0.3,
    "q4_0": 0.3,
    "iq4_nl": 0.3,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama", head_dim=32)
    make_tiny_qwen3moe(folder / "moe", tied=True, n_heads=4, n_kv_heads=1)
    opened = {}
    for name in ("llama", "moe"):
        with CheckpointSource(open_checkpoint(folder / name)) as source:
            opened[name] = load_model(write_gguf(folder / f"{name}.gguf", source))
    yield opened
    for model in opened.values():
        model.close()


def settings_of(name: str, hadamard: bool = False) -> CacheSettings:
    return CacheSettings(name, "q8_0" if name == "q8_kv" else name, hadamard, hadamard)


def in_pieces(model, settings: CacheSettings, sizes: list[int]) -> torch.Tensor:
    state, start, rows = model.new_state(len(TOKENS), settings), 0, []
    for size in sizes:
        rows.append(model.extend(TOKENS[start : start + size], state, all_logits=True))
        start += size
        assert state.n_past == start
    assert start == len(TOKENS)
    return torch.cat(rows)


def relative(x: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the size of each row of x relative to the row of `full`."""
    return x.square().mean(-1).sqrt() / full.square().mean(-1).sqrt()


# Each type after a transform has code of its own to compile. Steps of the others are compared with
# the reference path in test_cpu_steps.py; floats are not transformed.
TURNED = ("q8_0", "q5_0", "q4_1")


@pytest.mark.parametrize(
    "name, type, hadamard",
    [
        pytest.param(*case, marks=[] if quick else pytest.mark.full)
        for case in itertools.product(("llama", "moe"), CACHE_TYPES, (False, True))
        for name, type, hadamard in [case]
        for quick in [type == "q8_0" if name == "moe" else not hadamard or type in TURNED]
    ],
)
def test_all_at_once_is_one_by_one(models, name, type, hadamard):
    model, settings = models[name], settings_of(type, hadamard)
    full = model.forward(TOKENS)
    at_once = in_pieces(model, settings, [len(TOKENS)])
    assert relative(at_once - full, full).median() < TOLERANCE[type]
    for sizes in ([1] * len(TOKENS), [7, 1, 1, 12, 10], [30, 1]):
        # The last bits of a product depend on its number of rows, so a stored value may be rounded
        # in the other direction, or another expert may be chosen.
        difference = relative(in_pieces(model, settings, sizes) - at_once, full)
        assert difference.median() < TOLERANCE[type] / 8 and difference.max() < max(
            1e-4, TOLERANCE[type]
        )


def test_a_sequence_is_repeated_to_the_last_bit(models):
    for name in models:
        first, second = (
            in_pieces(models[name], settings_of("q6_0"), [20, 1, 10]) for _ in range(2)
        )
        assert torch.equal(first, second)


def test_last_logits_physical_batch_and_clearing(models):
    model = models["moe"]
    state = model.new_state(len(TOKENS))
    last = model.extend(TOKENS, state)
    assert last.shape == (model.n_vocab,)
    model.ubatch = 5
    try:
        state.clear()
        rows = model.extend(TOKENS, state, all_logits=True)
    finally:
        model.ubatch = 512
    assert rows.shape == (len(TOKENS), model.n_vocab)
    torch.testing.assert_close(rows[-1], last, rtol=0, atol=2e-3)


def test_capacity(models):
    model = models["llama"]
    state = model.new_state(3)
    assert state.capacity == 256 and state.nbytes == sum(
        block.mixer.state_bytes(256, CacheSettings()) for block in model.network.blocks
    )
    model.extend(TOKENS * 8, state)
    with pytest.raises(ShapeError, match="248 tokens and 31 more"):
        model.extend(TOKENS, state)
    with pytest.raises(UsageError):
        model.new_state(0)


@pytest.mark.parametrize("n", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("type", QUANTIZED)
def test_cached_rows_are_rows_of_the_type(type, n):
    """The bytes are those of the type of weights: its own decoder reads the same values, near the
    encoded ones.
    """
    x = torch.randn(64, n) * torch.logspace(-3, 3, 64)[:, None]
    x[0] = 0
    x[1, ::2] = 0
    x[2] = x[2].abs()
    cache_type = CACHE_TYPES[type]
    stored = cache_type.encode(x)
    assert stored.dtype == torch.uint8 and stored.shape == (64, cache_type.row_bytes(n))
    decoded = cache_type.decode(stored)
    assert torch.equal(
        decoded, torch.from_numpy(codec.decode(ggml_type(cache_type.name), stored.numpy(), n))
    )
    bits = {
        "q8_0": 8,
        "q8_kv": 7.3,
        "q6_0": 6,
        "q5_1": 5,
        "q5_0": 5,
        "q4_1": 4,
        "q4_0": 4,
        "iq4_nl": 3.9,
    }[type]
    error = (decoded - x).square().mean(-1).sqrt() / x.square().mean(-1).sqrt().clamp(min=1e-9)
    assert error.max() < 3.5 * 2.0**-bits and error.median() < 1.7 * 2.0**-bits
    random = torch.randint(0, 256, stored.shape, dtype=torch.uint8)  # every code, any scale
    expected = torch.from_numpy(codec.decode(ggml_type(cache_type.name), random.numpy(), n))
    assert torch.equal(cache_type.decode(random).nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.parametrize("name", [name for name in CACHE_TYPES if name != "q8_kv"])
def test_rows_in_other_layouts(name):
    """They are the same rows, and can be put back into a cache of another layout."""
    x = torch.randn(29, 2, 64, generator=torch.Generator().manual_seed(3))
    keys = "q8_kv" if name == "q8_0" else name
    caches = [
        KVCache.alone(256, 2, 64, 64, CacheSettings(keys, name), CPU, layout)
        for layout in RowLayout
    ]
    for cache in caches:
        cache.write(11, x, 2 * x)  # parts of three tiles
    stored = [cache.v.reshape(-1).clone() for cache in caches]
    for one, other in itertools.combinations(stored, 2):
        assert torch.equal(one, other) == (not caches[0].type_v.is_quantized)
    for other in caches[1:]:
        for first, second in zip(caches[0].save(11, 40), other.save(11, 40), strict=True):
            assert torch.equal(first, second)
        other.load(100, caches[0].save(11, 40))
        for read, wanted in zip(other.read(129, 100), caches[0].read(40, 11), strict=True):
            assert torch.equal(read, wanted)
        assert all(not x.any() for x in other.save(40, 100) + other.save(129, 256))


def test_tiles_of_a_cache():
    """Codes of 16 positions of a head stand together, then their scales."""
    settings = CacheSettings("q8_0", "q8_0")
    cache = KVCache.alone(64, 2, 64, 64, settings, CPU, RowLayout.TILES)
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(4))
    cache.write(0, x, x)
    rows = cache.type_k.by_fields(cache.type_k.encode(x))
    assert cache.k.shape == (4, 2, 16 * 68)
    assert BLOCK_TOKENS % TILE == 0, "sequences of a pool begin where a tile does"
    tile = cache.k[2, 1]
    assert torch.equal(tile[: 16 * 64].view(16, 64), rows[32:48, 1, :64])
    assert torch.equal(tile[16 * 64 :].view(16, 4), rows[32:48, 1, 64:])


def test_values_too_large_for_a_half_precision_scale_stay_finite():
    for type in QUANTIZED:
        assert (
            CACHE_TYPES[type]
            .decode(CACHE_TYPES[type].encode(torch.full((1, 32), 3e38)))
            .isfinite()
            .all()
        )


@pytest.mark.parametrize(
    "n, block", [(32, 32), (128, 128), (96, None), (192, 64), (384, 128), (576, 64), (1536, 512)]
)
def test_hadamard(n, block):
    if block is None:
        with pytest.raises(UsageError, match="96"):
            hadamard_block(n)
        return
    assert hadamard_block(n) == block
    x, y = torch.randn(2, 5, n)
    hx, hy = hadamard(x, block), hadamard(y, block)
    torch.testing.assert_close(hadamard(hx, block), x)
    torch.testing.assert_close((hx * hy).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-4)
    first = torch.zeros(n)
    first[0] = 1
    torch.testing.assert_close(
        hadamard(first, block),
        torch.cat([torch.full((block,), block**-0.5), torch.zeros(n - block)]),
    )


def test_hadamard_helps_rows_with_an_outlier():
    x = torch.randn(100, 128)
    x[:, 5] = 40
    plain, turned = (
        KVCache.alone(256, 1, 128, 128, CacheSettings("q4_0", "q4_0", h, h), torch.device("cpu"))
        for h in (False, True)
    )
    for cache in (plain, turned):
        cache.write(0, x[:, None], x[:, None])
    error, turned_error = (
        (cache.result(cache.read(100)[1])[:, 0] - x).square().mean() for cache in (plain, turned)
    )
    assert turned_error < 0.6 * error
    # A type that is not quantized is left alone.
    assert (
        KVCache.alone(
            256, 1, 96, 96, CacheSettings("f16", "bf16", True, True), torch.device("cpu")
        ).hadamard_k
        == 0
    )


def test_settings_that_cannot_be():
    for bad in (("q3_k", "f16"), ("f16", "nonsense\x1b"), ("f16", "q8_KV")):
        with pytest.raises(UsageError):
            CacheSettings(*bad)
    with pytest.raises(UsageError, match="head size of this model is 48"):
        KVCache.alone(256, 1, 48, 64, CacheSettings("q8_0"), torch.device("cpu"))
    CacheSettings("F16", "Q8_0")  # any case

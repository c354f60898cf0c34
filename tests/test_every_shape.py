"""Every synthetic shape opens, and kernels evaluate every branch of its blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from iqforge.cuda_kernels.attention import mla_shape
from iqforge.cuda_kernels.attention import shape as attention_shape
from iqforge.formats.types import ggml_type
from iqforge.runtime.architectures import architectures
from iqforge.runtime.bench.mixer_sizes import SelectiveSizes
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda import engine  # noqa: F401, it declares executors
from iqforge.runtime.cuda.common.delta_shapes import delta_heads
from iqforge.runtime.cuda.common.registry import PROMPT, STEP, Slow, check_description, placed
from iqforge.runtime.cuda.planned import buffer_bytes, kept_bytes
from iqforge.runtime.cuda.prompt.mixers import delta as prompt_delta
from iqforge.runtime.layers.attention import Attention
from iqforge.runtime.layers.mla import MLA
from iqforge.runtime.layers.recurrent.delta_net import DeltaNet
from iqforge.runtime.model import Model
from iqforge.runtime.parallel.share import NoMeeting, Share
from iqforge.runtime.split_model import make_plan
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.split_plan import length

from .choices import by_token, comparable, recorded
from .short_shapes import shortened

# Parameters in billions, as published.
SIZES = {
    "llama-8b": 8.03,
    "llama-70b": 70.6,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-27b": 26.9,
    "gemma-2b": 2.51,
    "gemma-7b": 8.54,
    "gemma2-9b": 9.24,
    "gemma3-27b": 27.0,
    "gemma3n-e2b": 4.46,  # without encoders of images and sounds
    "gemma3n-e4b": 6.87,
    "gemma4": 25.2,
    "gemma4-31b": 30.7,
    "afm-4.5b": 4.62,
    "glm4-9b": 9.4,
    "glm4-32b": 32.6,
    "glm-4.5-air": 106.9,
    "solar-open-100b": 102.6,
    "glm-5": 744,
    "ling-mini-2.0": 16.26,
    "ling-1t": 1000,
    "dots-llm1": 142,
    "exaone-4.0-1.2b": 1.28,
    "exaone-4.0-32b": 32.0,
    "hunyuan-a13b": 80.4,
    "hunyuan-0.5b": 0.54,
    "hunyuan-7b": 7.5,
    "hy3": 295,  # without the block that predicts further tokens
    "minimax-m2": 228.7,
    "olmoe-1b-7b": 6.92,
    "olmo2-7b": 7.3,
    "olmo3-32b": 32.2,
    "lfm2-1.2b": 1.17,
    "lfm2-8b-a1b": 8.34,
    "gpt-oss-20b": 20.9,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "deepseek-v3.2": 672,
    "mistral-small-4": 119,
    "phi3-mini": 3.82,
    "phi4": 14.7,
    "phi4-mini": 3.84,
    "starcoder2-15b": 15.96,
    "qwen2.5-7b": 7.62,
    "qwen1.5-moe-a2.7b": 14.3,
    "ministral3-14b": 13.5,
    "seed-oss-36b": 36.15,
    "command-r-35b": 35.0,
    "command-r7b": 8.03,
    "north-mini-code": 30.5,
    "command-a-plus": 218,  # without the vision tower
    "granite-3.3-8b": 8.17,
    "mellum2-12b-a2.5b": 12.15,
    "laguna-xs.2": 33.4,
    "laguna-s-2.1": 118,
    "granite-swash-2b": 2.144,
    "granite-swash-3b-a600m": 3.02,
    "granite-4.0-h-7b": 6.94,
    "nemotron-h-8b": 8.1,
    "nemotron-3-nano-30b-a3b": 31.6,
    "granite-3.1-3b-a800m": 3.30,
    "codestral-mamba-7b": 7.285,
    "jamba-v0.1": 51.57,
    "mamba-2.8b": 2.77,
    "falcon-mamba-7b": 7.27,
    "mamba2-2.7b": 2.70,
    "falcon-h1-7b": 7.59,
    "kimi-linear-48b-a3b": 49.1,
    "ling-3.0-8b": 7.9,
    "ling-3.0-flash": 124.4,
    "falcon-h1-34b": 33.6,
    "smollm3-3b": 3.08,
    "nemotron-mini-4b": 4.19,
    "stablelm-2-1.6b": 1.64,
    "minicpm-2b": 2.72,  # 2.4 without the embedding
    "minicpm3-4b": 4.07,
    "ernie-4.5-0.3b": 0.36,
    "ernie-4.5-21b-a3b": 21.8,
    "mixtral-8x7b": 46.7,
    "phi-3.5-moe": 41.9,
    "kimi-k2": 1026,
    "llama-4-scout": 107.8,  # without the vision tower
    "llama-4-maverick": 400,
    "trinity-mini": 26,
    "trinity-large": 398,
    "mimo-v2-flash": 309,
    "deepseek-moe-16b": 16.4,
    "qwen3-vl-8b": 8.19,
    "qwen3-vl-30b-a3b": 30.5,
    "internlm2-7b": 7.74,
    "internlm2-20b": 19.86,
    "apertus-8b": 8.05,
    "apertus-70b": 70.6,
    "k-exaone": 236,
    "deepseek-v4-flash": 284,
    "hy4-preview": 770,  # without the block that predicts further tokens
    "glm-5.3-flash": 313.3,  # 320 with the block that predicts further tokens
    "qwen3.8-flash-next": 176,  # 125, and 51 of n-grams
    "step-3.5-flash": 196,  # without blocks that predict further tokens
}


# Others of the same architecture have the same layers.
LARGER = {
    "llama-70b",
    "apertus-70b",
    "falcon-h1-34b",
    "trinity-large",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
    "kimi-k2",
    "ling-1t",
    "ling-3.0-flash",
}
# Those that kernels evaluate, those that they evaluate in part, and the others.
KERNELS = [name for name in SHAPES if architectures()[SHAPES[name].architecture].gpu]
LAYER_BY_LAYER = [
    name
    for name in SHAPES
    if SHAPES[name].architecture in ("deepseek4", "glm5-next", "qwen4exp", "hy_v4")
]
PARTLY = {*SHAPES} - {*KERNELS, *LAYER_BY_LAYER}
# Rows of 288 elements are no whole words in some types, as kernels of steps read them, and have no
# Hadamard transform.
UNEVEN = {"minicpm3-4b"}
LATENT = [name for name in KERNELS if SHAPES[name].latent is not None]
EACH = [
    pytest.param(name, marks=pytest.mark.full) if name in LARGER else name
    for name in SHAPES
    if name not in LAYER_BY_LAYER
]


def test_every_architecture_has_a_shape():
    found = {shape.architecture for shape in SHAPES.values()}
    assert found == set(architectures())


def slow_layers(model: Model) -> set[str]:
    """Return the kinds of layers that kernels do not evaluate, and why."""
    slow = set()
    for branch in placed(model.network.blocks):
        try:
            check_description(branch.branch)
            assert type(branch.module) in PROMPT and type(branch.module) in STEP
        except Slow as reason:
            slow.add(f"{type(branch.module).__name__}: {reason}")
    return slow


@pytest.fixture(scope="module")
def opened(request):
    """(name, model), once for all tests of it."""
    with Model(SyntheticSource(f"{request.param}:Q8_0"), "cpu") as model:
        yield request.param, model


@pytest.mark.parametrize("opened", EACH, indirect=True)
def test_no_layer_is_slow(opened):
    name, model = opened
    assert bool(slow_layers(model)) == (name in PARTLY)


@pytest.mark.parametrize("name", LAYER_BY_LAYER)
def test_what_has_no_kernels_says_so(name):
    """All branches, and on a GPU nothing is asked of kernels."""
    said = []
    with Model(SyntheticSource(f"{name}:Q8_0"), "cpu", verbose=said.append) as model:
        slow = slow_layers(model)
        assert len(slow) == len({type(b.module) for b in placed(model.network.blocks)})
        assert all(reason.endswith(": several residual streams") for reason in slow)
        assert not said
        model.precision, model.device = "bf16", torch.device("cuda")
        model._leave_to_reference_path(model.network)
        assert model.precision == "f32" and not model.is_fast
    assert said == ["several residual streams have no kernels: float32, layer by layer"]


@pytest.mark.parametrize("name", LAYER_BY_LAYER)
@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 2), (1,) * 9])
def test_ranks_of_what_has_no_kernels(name, shares):
    """Heads and experts are split. Where groups of heads are, a rank may have none of them."""
    source = SyntheticSource(f"{name}:IQ4_K")
    plan = make_plan(source, shares)
    for rank in range(len(shares)):
        with Model(source, "cpu", share=Share(plan, rank, NoMeeting())) as model:
            assert slow_layers(model)
    shape = SHAPES[name]
    # Where deltas have three heads of values, blocks of 256 columns have two of keys.
    groups = getattr(shape, "groups", 8 if shape.delta is not None else len(shares))
    of_deltas = shape.n_heads if shape.delta is None else shape.delta.key_heads
    for layer in plan.layers:
        heads = [part.n_heads + length(part.key_heads) for part in layer]  # of one kind in a layer
        assert sum(heads) == (shape.n_heads if any(x.n_heads for x in layer) else of_deltas)
        assert sum(n > 0 for n in heads) >= min(len(shares), groups)


@pytest.mark.parametrize("name", EACH)
def test_no_layer_is_slow_on_ranks(name):
    """By their descriptions, also where a rank has a part of a layer, or none."""
    source, shares = SyntheticSource(f"{name}:IQ4_K"), (3, 1, 2)
    plan = make_plan(source, shares)
    for rank in range(len(shares)):
        with Model(source, "cpu", share=Share(plan, rank, NoMeeting())) as model:
            assert bool(slow_layers(model)) == (name in PARTLY)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name):
    elements = 0
    for _, shape in SHAPES[name].tensors():
        size = 1
        for n in shape:
            size *= n
        elements += size
    assert elements / 1e9 == pytest.approx(SIZES[name], rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("name", KERNELS)
def test_no_layer_is_slow_on_a_device(name, precision, monkeypatch):
    """In prompts and steps. Every run gives the same bits; where all experts are used, these are
    near the results of float32.
    """
    tokens = torch.randint(512, (300,), generator=torch.Generator().manual_seed(1))
    pieces, slow = [256, 20, 8, 1, 1, 1, 1, 12], []

    def logits(shape, **options):
        monkeypatch.setitem(SHAPES, "short", shape)
        with Model(SyntheticSource("short:IQ4_K"), "cuda", **options) as model:
            state = model.new_state(512)
            parts = tokens.split(pieces)
            return torch.cat([model.extend(x, state, all_logits=True).cpu() for x in parts])

    for shape in (shortened(name), shortened(name, all_experts=True)):
        found, again = (logits(shape, precision=precision, verbose=slow.append) for _ in range(2))
        assert not slow
        assert torch.equal(found, again)
    with recorded(monkeypatch) as calls:
        expected = logits(shape, precision="f32")
        wanted = by_token(calls, pieces)
        calls.clear()
        assert torch.equal(logits(shape, precision=precision), found)
        same = comparable(by_token(calls, pieces), wanted, len(tokens))
    # Of positions, if not of experts, some may be chosen otherwise.
    assert same.all() or (shape.indexer is not None and same.sum() >= 128)
    if SHAPES["short"].architecture == "gemma4":
        return  # random scores without a scale are too sharp; see test_architectures_cuda.py
    off = ((found - expected).square().mean(1).sqrt() / expected.std())[same]
    # Delta nets norm the results of heads, whose zeros are jumps: hence not every token.
    assert off.square().mean().sqrt() < 0.03 and (off < 0.06).double().mean() > 0.98, off


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name, type, cache, turned",
    [(name, "BF16", "f16", False) for name in KERNELS]
    + [(name, "IQ4_K", "q8_0", False) for name in KERNELS if name not in UNEVEN]
    + [(name, "IQ4_K", "q4_0", True) for name in LATENT if name not in UNEVEN]
    + [(name, "IQ4_K", "f32", False) for name in LATENT],
)
def test_no_layer_is_slow_with_floats_or_an_encoded_cache(name, type, cache, turned, monkeypatch):
    monkeypatch.setitem(SHAPES, "short", shortened(name))
    tokens = torch.randint(512, (64,), generator=torch.Generator().manual_seed(1))
    settings, slow = CacheSettings(cache, cache, hadamard_k=turned), []
    with Model(
        SyntheticSource(f"short:{type}"), "cuda", cache=settings, verbose=slow.append
    ) as model:
        runs = []
        for _ in range(2):
            state = model.new_state(512)
            runs.append([model.extend(x, state).cpu() for x in tokens.split([56, 4, 1, 1, 1, 1])])
    assert not slow
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("opened", EACH, indirect=True)
def test_memory_is_known_before_anything_is_loaded(opened):
    """More tokens at a time, and more positions, take more; kept copies count once per layer."""
    device, settings = torch.device("meta"), CacheSettings()
    name, model = opened
    network = model.network
    sizes = [
        buffer_bytes(network.blocks, network.width, rows, keys, settings, device)
        for rows, keys in ((256, 1024), (512, 1024), (512, 200_000))
    ]
    kept = kept_bytes(network.blocks, settings)
    assert kept == sum(kept_bytes([block], settings) for block in network.blocks)
    assert 0 < sizes[0] < sizes[1] <= sizes[2]
    shape = SHAPES[name]
    if shape.latent is not None:
        s = shape.latent
        n_latent = len(getattr(shape, "attending", ())) or shape.n_layers
        matrices = n_latent * shape.n_heads * s.kv_rank * (s.nope + s.value)
        assert kept >= 2 * matrices
    recurrent = shape.delta or getattr(shape, "recurrent", None)
    if isinstance(recurrent, SelectiveSizes):  # no kernels step through these
        recurrent = None
    assert (kept == 0) == (not shape.n_experts and shape.latent is None and not recurrent)


@pytest.mark.parametrize("opened", EACH, indirect=True)
def test_attention_of_steps_has_kernels_where_a_block_has_99_kb(opened):
    """With every type of cache, as on an RTX; also latent attention with `-khad`."""
    limit, types = 97 << 10, attention_shape.TYPES
    name, model = opened
    mixers = [mixer for block in model.network.blocks for mixer in block.mixers]
    latent = {(m.spec, m.top_k) for m in mixers if isinstance(m, MLA)}
    for (s, top_k), type, turned in itertools.product(latent, types, (0, 64)):
        if turned and (ggml_type(type).is_float or name in UNEVEN):
            continue
        sizes = s.heads, s.nope_length, s.rope_length, s.kv_rank, s.value_length
        shape = mla_shape.LatentShape(8, *sizes, type, torch.float16, False, None, top_k, turned)
        uneven = name in UNEVEN and not ggml_type(type).is_float and shape.row_bytes % 4 != 0
        assert mla_shape.fits(shape, limit) != uneven, shape
    heads = {
        (m.spec.group, m.spec.kv_heads, m.spec.key_length, m.spec.value_length)
        for m in mixers
        if isinstance(m, Attention)
    }
    for sizes, type_k, type_v in itertools.product(heads, types, types):
        if type_v != "Q8_KV":  # a type of keys
            shape = attention_shape.AttentionShape(1, *sizes, type_k, type_v, sizes[2], True, True)
            assert attention_shape.fits(shape, limit), shape


@pytest.mark.parametrize("name", [name for name, s in SHAPES.items() if s.delta is not None])
def test_delta_nets_of_prompts_have_kernels_where_a_block_has_99_kb(name, monkeypatch):
    """As on sm_86, sm_89 and sm_120."""
    facts = SimpleNamespace(shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    limit = prompt_delta.shared_limit(torch.device("cuda"))
    with Model(SyntheticSource(f"{name}:Q8_0"), "cpu") as model:
        mixers = [mixer for block in model.network.blocks for mixer in block.mixers]
    heads = {delta_heads(m) for m in mixers if isinstance(m, DeltaNet)}
    assert heads
    assert all(prompt_delta.fitting_stages(x, limit) for x in heads)

"""Models on a GPU: the CPU's logits, tokens, perplexities and importance matrices, for every
placement and precision.
"""

from __future__ import annotations

import iqforge
import numpy as np
import pytest
import torch
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import IqforgeError, UsageError
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.generate import generate_tokens
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.network.sampling import GREEDY, Sampling
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.weights.placement import ALL, Request, parse_overrides
from iqforge.runtime.weights.switches import Switches

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 40).tolist()]
GPU = {"device": "cuda", "precision": "f32"}
DENSE, MOE = "llama-tiny:IQ4_K", "qwen3moe-tiny:Q6_K"
# error of half precision relative to the logits, in the median of positions; 0.01 is usual
NEAR = 0.03


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write small models with a tokenizer: llama and qwen3moe in BF16."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama", head_dim=32)
    make_tiny_qwen3moe(folder / "moe", tied=True, n_heads=4, n_kv_heads=1)
    paths = {}
    for name in ("llama", "moe"):
        with CheckpointSource(open_checkpoint(folder / name)) as source:
            paths[name] = write_gguf(
                folder / f"{name}.gguf",
                source,
                lambda t: "BF16" if len(t.shape) > 1 and "ffn_gate_inp" not in t.name else "F32",
            )
    return paths


def opened(spec: str, **options) -> Model:
    return Model(SyntheticSource(spec), **options)


def forward(spec: str, **options) -> torch.Tensor:
    with opened(spec, **options) as model:
        return model.forward(TOKENS).cpu()


def stepped(model: Model, settings: CacheSettings | None = None) -> torch.Tensor:
    """Return the logits of a prompt of 30 tokens and then of one token at a time."""
    state = model.new_state(64, settings)
    rows = [
        model.extend(TOKENS[:30], state, all_logits=True),
        *(model.extend([t], state)[None] for t in TOKENS[30:]),
    ]
    return torch.cat(rows).cpu()


def relative(x: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return (x.cpu() - full).square().mean(-1).sqrt() / full.square().mean(-1).sqrt()


def assert_near(x: torch.Tensor, full: torch.Tensor) -> None:
    difference = relative(x, full)
    assert difference[:30].median() < NEAR and difference[30:].median() < NEAR


@pytest.mark.parametrize(
    "spec", [DENSE, MOE, "llama-tiny:F32", "qwen3moe-tiny:IQ4_K_R4", "llama-tiny:Q8_0"]
)
def test_logits_are_those_of_the_cpu_and_repeat(spec):
    expected = forward(spec)
    with opened(spec, **GPU) as model:
        first, second = model.forward(TOKENS), model.forward(TOKENS)
        assert first.is_cuda and torch.equal(first, second)
        assert (first.cpu() - expected).abs().max() < 1e-4


PLACEMENTS = [
    Request(gpu_layers=0),
    Request(gpu_layers=1),
    Request(overrides=parse_overrides(r"ffn_down(_exps)?=CPU")),
    Request(overrides=parse_overrides(r"attn_v=CPU,output=CPU,token_embd=CPU")),
    Request(gpu_layers=1, overrides=parse_overrides(r"blk\.0\.=CUDA0")),
]


@pytest.mark.parametrize("request_", PLACEMENTS)
@pytest.mark.parametrize("spec", [DENSE, MOE])
def test_whatever_stays_on_the_cpu(spec, request_):
    expected, slow = forward(spec), []
    with opened(spec, placement=request_, **GPU) as model:
        assert (model.forward(TOKENS).cpu() - expected).abs().max() < 1e-4
        assert (stepped(model, CacheSettings("f32", "f32")) - expected).abs().max() < 1e-4
        assert "cpu" in {p.device.type for p in model.weights.parameters}
    with opened(
        spec, device="cuda", placement=request_, verbose=slow.append
    ) as model:  # fast and slow layers together
        assert_near(model.forward(TOKENS), expected)
        assert_near(stepped(model), expected)
    assert slow and all(line.startswith("slow path") for line in slow)


@pytest.mark.parametrize("cpu_experts", [1, ALL])
def test_experts_on_the_cpu(cpu_experts):
    expected = forward(MOE)
    for precision, most in (("f32", 1e-5), ("bf16", NEAR)):
        with opened(
            MOE, device="cuda", precision=precision, placement=Request(cpu_experts=cpu_experts)
        ) as model:
            devices = {p.device.type for p in model.weights.parameters if "_exps" in p.name}
            assert devices == ({"cpu", "cuda"} if cpu_experts == 1 else {"cpu"})
            assert relative(model.forward(TOKENS), expected).median() < most


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("type", CACHE_TYPES)
def test_caches_hold_the_bytes_that_they_hold_on_the_cpu(type, hadamard):
    from iqforge.runtime.state.cache import KVCache

    settings, x = (
        CacheSettings(type, "q8_0" if type == "q8_kv" else type, hadamard, hadamard),
        torch.randn(50, 3, 128) * torch.logspace(-4, 4, 50)[:, None, None],
    )
    caches = [
        KVCache.alone(256, 3, 128, 128, settings, torch.device(device))
        for device in ("cpu", "cuda")
    ]
    for cache in caches:
        cache.write(5, x.to(cache.k.device), 2 * x.to(cache.k.device))
    host, gpu = caches
    for a, b in zip(host.save(5, 55), gpu.save(5, 55)):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
    gpu.load(100, host.save(5, 55))  # as states are that come from a file
    for a, b, c in zip(host.read(55, 5), gpu.read(55, 5), gpu.read(150, 100)):
        assert torch.equal(a, b.cpu()) and torch.equal(a, c.cpu())


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(seed=3), Sampling(1.5, 0, 1.0, 0.0, seed=2**40)]
)
@pytest.mark.parametrize("spec", [DENSE, MOE])
def test_the_same_tokens_as_on_the_cpu(spec, sampling):
    settings = CacheSettings("f32", "f32")
    with opened(spec) as host, opened(spec, **GPU) as gpu:
        tokens = [
            list(generate_tokens(model, TOKENS[:10], 30, sampling, settings=settings))
            for model in (host, gpu, gpu)
        ]
    assert tokens[1] == tokens[2] == tokens[0]


@pytest.mark.parametrize(
    "switches",
    [
        Switches(merge_gate_up=True),
        Switches(flash_attention=False, attention_buffer=1),
        Switches(ser=(1, 0.4)),
    ],
)
def test_switches(switches):
    expected = forward(MOE, switches=switches)
    assert (forward(MOE, switches=switches, **GPU) - expected).abs().max() < 1e-4
    with opened(MOE, device="cuda", switches=switches) as model:
        assert_near(model.forward(TOKENS), expected)
        assert_near(stepped(model), expected)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("spec", [DENSE, "qwen3moe-tiny:IQ4_K", "llama-tiny:BF16"])
def test_half_precision_is_near_and_repeats(spec, precision):
    expected = forward(spec)
    with opened(spec, device="cuda", precision=precision) as model:
        first, second = model.forward(TOKENS), model.forward(TOKENS)
        assert torch.equal(first, second)
        assert_near(first, expected)
        assert_near(stepped(model), expected)
        tokens = [
            list(generate_tokens(model, TOKENS[:30], 30, sampling))
            for sampling in (GREEDY, Sampling(seed=1))
            for _ in range(2)
        ]
        assert tokens[0] == tokens[1] and tokens[2] == tokens[3] and len(tokens[0]) == 30


@pytest.mark.parametrize("name", ["mini-llama", "mini-qwen3moe"])
def test_perplexity_of_trained_models(name, tmp_path):
    text = shared("text/wiki.test.txt")
    path = iqforge.convert_model(shared(f"models/{name}"), tmp_path / "m.gguf", outtype="q8_0")
    expected = iqforge.measure_perplexity(path, text, chunks=8).perplexity
    for precision, most in (("f32", 2e-4), ("bf16", 2e-3), ("f16", 2e-3), ("int8", 4e-3)):
        with load_model(path, "cuda", precision=precision) as gpu:
            first, second = (
                iqforge.measure_perplexity(gpu, text, chunks=8).perplexity for _ in range(2)
            )
        assert first == second and abs(first / expected - 1) < most


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_importance_matrix(files, name):
    text = "one two three four five six seven eight nine ten\n" * 100
    host = iqforge.collect_imatrix(files[name], text, n_ctx=64, chunks=6)
    with load_model(files[name], "cuda", precision="f32") as model:
        gpu, again = (iqforge.collect_imatrix(model, text, n_ctx=64, chunks=6) for _ in range(2))
    assert host.entries.keys() == gpu.entries.keys()
    for tensor, entry in host.entries.items():
        assert np.array_equal(entry.counts, gpu.entries[tensor].counts)
        np.testing.assert_allclose(gpu.entries[tensor].sums, entry.sums, rtol=1e-3)
        assert np.array_equal(gpu.entries[tensor].sums, again.entries[tensor].sums)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen3moe-tiny:IQ4_K"])
def test_memory_is_what_was_announced(spec, precision):
    torch.cuda.empty_cache()
    with opened(spec, device="cuda", precision=precision, context=1000) as model:
        [announced] = [m for m in model.memory() if m.device.type == "cuda"]
        before = torch.cuda.memory_allocated()
        model.load()
        assert (
            abs(torch.cuda.memory_allocated() - before - announced.weights)
            < 0.02 * announced.weights + 65536
        )
        before = torch.cuda.memory_allocated()
        state = model.new_state(1000)
        assert torch.cuda.memory_allocated() - before == announced.cache == state.nbytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.extend([1] * 1000, state)
        model.extend([1], state)
        assert torch.cuda.max_memory_allocated() - before <= announced.compute


def test_too_little_memory_is_an_error_with_numbers(files, monkeypatch, capsys):
    from iqforge.cli import main

    monkeypatch.setattr(
        "iqforge.runtime.memory.free_bytes",
        lambda device: 100_000 if device.type == "cuda" else 1 << 30,
    )
    words = [
        "generate",
        "-m",
        str(files["llama"]),
        "-p",
        "one two",
        "-n",
        "4",
        "--device",
        "cuda",
        "--precision",
        "f32",
    ]
    assert main(words) == 1
    assert "MiB free, the model takes" in capsys.readouterr().err
    assert main([*words, "--fit", "0"]) == 0  # then it runs on the CPU
    assert "cpu" in capsys.readouterr().err


def test_missing_devices():
    with pytest.raises(UsageError):
        opened(DENSE, device="cuda:99")
    with pytest.raises(IqforgeError):
        opened(DENSE, placement=Request(overrides=parse_overrides("attn=CUDA99")), **GPU)


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_sensitivities_are_the_cpu_s(files, tmp_path, name):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    options = {"n_ctx": 32, "chunks": 2, "types": ["IQ4_NL"]}
    expected = iqforge.measure_sensitivity(files[name], text, **options)
    for placed in ({}, {"gpu_layers": 1}, {"precision": "f16"}):
        found = iqforge.measure_sensitivity(files[name], text, device="cuda", **options, **placed)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.tensors, ours.error) == (theirs.tensors, theirs.error)
            rel, noise = (0.05, 1e-5) if "precision" in placed else (0.02, 1e-6)
            assert ours.kld == pytest.approx(theirs.kld, rel=rel, abs=noise)

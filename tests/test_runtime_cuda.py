"""The truth path on a GPU: the CPU's logits, perplexities and importance matrices, wherever the weights lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import iqforge
from iqforge.convert.checkpoint import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import IqforgeError, UsageError
from iqforge.formats.types import ggml_type
from iqforge.runtime.cache import CacheSettings
from iqforge.runtime.cache_types import CACHE_TYPES
from iqforge.runtime.generate import generate_tokens
from iqforge.runtime.model import load_model
from iqforge.runtime.placement import ALL, Request, parse_overrides
from iqforge.runtime.sampling import GREEDY, Sampling
from iqforge.runtime.switches import Switches

from .shared import shared
from .tiny_checkpoint import make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS = [0, *np.random.default_rng(1).integers(2, 300, 40).tolist()]
GPU = {"device": "cuda", "precision": "f32"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """llama and qwen3moe in F32 and in types of several families."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "llama", head_dim=32)
    make_tiny_qwen3moe(folder / "moe", tied=True, n_heads=4, n_kv_heads=1)
    paths = {}
    for name in ("llama", "moe"):
        with CheckpointSource(open_checkpoint(folder / name)) as source:
            for type in ("F32", "BF16", "IQ4_K", "Q8_0", "Q6_0"):
                paths[f"{name}-{type}"] = write_gguf(folder / f"{name}-{type}.gguf", source, lambda t: _type(t, type))
    return paths


def _type(tensor, type: str) -> str:
    if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name:
        return "F32"
    return type if tensor.n_cols % ggml_type(type).block_size == 0 else "Q8_0"


def forward(path, tokens=TOKENS, **options) -> torch.Tensor:
    with load_model(path, **options) as model:
        return model.forward(tokens).cpu()


@pytest.mark.parametrize("name", ["llama", "llama31", "mistral", "mixtral", "qwen3_moe"])
def test_logits_are_those_of_transformers(name):
    expected = np.load(shared(f"golden/convert/{name}/logits.npz"))
    logits = forward(shared(f"golden/convert/{name}/expected-f32.gguf"), expected["input_ids"], **GPU).numpy()
    assert np.abs(logits - expected["logits"]).max() < 1e-3


@pytest.mark.parametrize("type", ["F32", "BF16", "IQ4_K", "Q8_0", "Q6_0"])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_logits_are_those_of_the_cpu_and_repeat(models, name, type):
    path = models[f"{name}-{type}"]
    expected = forward(path)
    with load_model(path, **GPU) as model:
        first, second = model.forward(TOKENS), model.forward(TOKENS)
        assert first.is_cuda and torch.equal(first, second)
        assert (first.cpu() - expected).abs().max() < 1e-4


PLACEMENTS = [Request(gpu_layers=0), Request(gpu_layers=1), Request(overrides=parse_overrides(r"ffn_down(_exps)?=CPU")),
              Request(overrides=parse_overrides(r"attn_v=CPU,output=CPU,token_embd=CPU")),
              Request(gpu_layers=1, overrides=parse_overrides(r"blk\.0\.=CUDA0"))]


def test_experts_on_the_cpu(models):
    expected = forward(models["moe-Q6_0"])
    for request in (Request(cpu_experts=1), Request(cpu_experts=ALL)):
        for precision, most in (("f32", 1e-5), ("bf16", 0.03)):
            with load_model(models["moe-Q6_0"], "cuda", precision=precision, placement=request) as model:
                assert {p.device.type for p in model.weights.parameters if "_exps" in p.name} == {"cpu"} | (
                    {"cuda"} if request.cpu_experts == 1 else set())
                assert relative(model.forward(TOKENS).cpu(), expected).median() < most


@pytest.mark.parametrize("request_", PLACEMENTS)
@pytest.mark.parametrize("name", ["llama-IQ4_K", "moe-Q6_0"])
def test_whatever_stays_on_the_cpu(models, name, request_):
    expected = forward(models[name])
    with load_model(models[name], placement=request_, **GPU) as model:
        assert (model.forward(TOKENS).cpu() - expected).abs().max() < 1e-4
        state = model.new_state(64, CacheSettings("f32", "f32"))
        stepped = torch.cat([model.extend(TOKENS[:30], state, all_logits=True), *(model.extend([t], state)[None] for t in TOKENS[30:])])
        assert (stepped.cpu() - expected).abs().max() < 1e-4
        devices = {p.device.type for p in model.weights.parameters}
        assert "cpu" in devices


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("type", [name for name in CACHE_TYPES if name != "q8_kv"])
def test_caches_hold_the_bytes_that_they_hold_on_the_cpu(type, hadamard):
    from iqforge.runtime.cache import KVCache

    settings, x = CacheSettings(type, type, hadamard, hadamard), torch.randn(50, 3, 128) * torch.logspace(-4, 4, 50)[:, None, None]
    caches = [KVCache(256, 3, 128, 128, settings, torch.device(device)) for device in ("cpu", "cuda")]
    for cache in caches:
        cache.write(5, x.to(cache.k.device), 2 * x.to(cache.k.device))
    host, gpu = caches
    for a, b in ((host.k, gpu.k), (host.v, gpu.v)):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
    for a, b in zip(host.read(60), gpu.read(60)):
        assert torch.equal(a, b.cpu())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3), Sampling(1.5, 0, 1.0, 0.0, seed=2**40)])
def test_the_same_tokens_as_on_the_cpu(models, sampling):
    for name in ("llama-IQ4_K", "moe-IQ4_K"):
        with load_model(models[name]) as host, load_model(models[name], **GPU) as gpu:
            settings = CacheSettings("f32", "f32")
            tokens = [list(generate_tokens(model, TOKENS[:10], 40, sampling, settings=settings)) for model in (host, gpu, gpu)]
        assert tokens[1] == tokens[2] == tokens[0]


def test_switches_on_a_gpu(models):
    path = models["moe-IQ4_K"]
    for switches in (Switches(merge_gate_up=True), Switches(flash_attention=False, attention_buffer=1), Switches(ser=(1, 0.4))):
        expected = forward(path, switches=switches)
        assert (forward(path, switches=switches, **GPU) - expected).abs().max() < 1e-4


def test_importance_matrix(models, tmp_path):
    text = "one two three four five six seven eight nine ten\n" * 100
    for name in ("llama-BF16", "moe-BF16"):
        host = iqforge.collect_imatrix(models[name], text, n_ctx=64, chunks=6)
        with load_model(models[name], "cuda") as model:
            gpu, again = (iqforge.collect_imatrix(model, text, n_ctx=64, chunks=6) for _ in range(2))
        assert host.entries.keys() == gpu.entries.keys()
        for tensor, entry in host.entries.items():
            assert np.array_equal(entry.counts, gpu.entries[tensor].counts)
            np.testing.assert_allclose(gpu.entries[tensor].sums, entry.sums, rtol=1e-3)
            assert np.array_equal(gpu.entries[tensor].sums, again.entries[tensor].sums)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("spec", ["llama-tiny:Q8_0", "qwen3moe-tiny:IQ4_K"])
def test_memory_is_what_was_announced(spec, precision):
    from iqforge.runtime.model import Model
    from iqforge.runtime.synthetic import SyntheticSource

    torch.cuda.empty_cache()
    with Model(SyntheticSource(spec), "cuda", precision=precision, context=1000) as model:
        [announced] = [m for m in model.memory() if m.device.type == "cuda"]
        before = torch.cuda.memory_allocated()
        model.load()
        assert abs(torch.cuda.memory_allocated() - before - announced.weights) < 0.02 * announced.weights + 65536
        before = torch.cuda.memory_allocated()
        state = model.new_state(1000)
        assert torch.cuda.memory_allocated() - before == announced.cache == state.nbytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.extend([1] * 1000, state)
        model.extend([1], state)
        assert torch.cuda.max_memory_allocated() - before <= announced.compute


def test_too_little_memory_is_an_error_with_numbers(models, tmp_path, monkeypatch, capsys):
    from iqforge.cli import main

    monkeypatch.setattr("iqforge.runtime.memory.free_bytes", lambda device: 100_000 if device.type == "cuda" else 1 << 30)
    words = ["generate", "-m", str(models["llama-Q8_0"]), "-p", "one two", "-n", "4", "--device", "cuda", "--precision", "f32"]
    assert main(words) == 1
    assert "MiB free, the model takes" in capsys.readouterr().err
    assert main([*words, "--fit", "0"]) == 0  # then it runs on the CPU
    assert "cpu" in capsys.readouterr().err


def test_devices_that_are_not_there(models):
    with pytest.raises(UsageError):
        load_model(models["llama-F32"], "cuda:99")
    with pytest.raises(IqforgeError):
        load_model(models["llama-F32"], placement=Request(overrides=parse_overrides("attn=CUDA99")), **GPU)
    with pytest.raises(UsageError, match="q8_kv"):
        with load_model(models["llama-F32"], **GPU) as model:
            model.new_state(10, CacheSettings("q8_KV", "f16"))


# ---- the fast path behind a model


def relative(x: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    return (x - full).square().mean(-1).sqrt() / full.square().mean(-1).sqrt()


@pytest.mark.parametrize("precision", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["llama-IQ4_K", "moe-Q6_0", "llama-BF16"])
def test_half_precision_is_near_and_repeats(models, name, precision):
    expected, prompt = forward(models[name]), TOKENS[:30]
    with load_model(models[name], "cuda", precision=precision) as model:
        first, second = model.forward(TOKENS), model.forward(TOKENS)
        assert torch.equal(first, second)
        assert relative(first.cpu(), expected).median() < 0.03
        state = model.new_state(64)
        stepped = torch.cat([model.extend(prompt, state, all_logits=True), *(model.extend([t], state)[None] for t in TOKENS[30:])])
        assert relative(stepped.cpu(), expected)[:30].median() < 0.03 and relative(stepped.cpu(), expected)[30:].median() < 0.03
        tokens = [list(generate_tokens(model, prompt, 30, sampling)) for sampling in (GREEDY, Sampling(seed=1)) for _ in range(2)]
        assert tokens[0] == tokens[1] and tokens[2] == tokens[3] and len(tokens[0]) == 30


@pytest.mark.parametrize("request_", PLACEMENTS)
@pytest.mark.parametrize("name", ["llama-IQ4_K", "moe-Q6_0"])
def test_fast_and_slow_layers_together(models, name, request_):
    expected, slow = forward(models[name]), []
    with load_model(models[name], "cuda", placement=request_, verbose=slow.append) as model:
        assert relative(model.forward(TOKENS).cpu(), expected).median() < 0.03
        state = model.new_state(64)
        stepped = torch.cat([model.extend(TOKENS[:30], state, all_logits=True), *(model.extend([t], state)[None] for t in TOKENS[30:])])
        assert relative(stepped.cpu(), expected)[:30].median() < 0.03 and relative(stepped.cpu(), expected)[30:].median() < 0.03
    assert slow and all(line.startswith("slow path: ") for line in slow)


@pytest.mark.parametrize("switches", [Switches(merge_gate_up=True), Switches(flash_attention=False), Switches(ser=(1, 0.4))])
def test_switches_in_half_precision(models, switches):
    path = models["moe-Q8_0"]
    expected = forward(path, switches=switches)
    with load_model(path, "cuda", switches=switches) as model:
        assert relative(model.forward(TOKENS).cpu(), expected).median() < 0.03
        state = model.new_state(64)
        stepped = torch.cat([model.extend([t], state)[None] for t in TOKENS])
        assert relative(stepped.cpu(), expected).median() < 0.03


@pytest.mark.parametrize("name", ["mini-llama", "mini-qwen3moe"])
def test_perplexity_of_trained_models(name, tmp_path):
    text = shared("text/wiki.test.txt")
    model = iqforge.convert_model(shared(f"models/{name}"), tmp_path / "m.gguf")
    path = tmp_path / "q.gguf"
    iqforge.quantize_model(model, path, "IQ4_K", pure=True, token_embedding_type="q8_0", output_tensor_type="q8_0")
    expected = iqforge.measure_perplexity(path, text, chunks=10).perplexity
    for precision, most in (("f32", 2e-4), ("bf16", 2e-3), ("f16", 2e-3)):
        with load_model(path, "cuda", precision=precision) as gpu:
            first, second = (iqforge.measure_perplexity(gpu, text, chunks=10).perplexity for _ in range(2))
        assert first == second and abs(first / expected - 1) < most

"""Random models of every class, in quantized types, on several ranks against one."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.share import Share
from iqforge.runtime.split_model import make_plan
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from .golden import GOLDEN
from .latent_models import layouts
from .random_models import NO_GATES, WITH_EXPERTS, Models
from .shared import shared
from .thread_ranks import ThreadMeeting, logits_on_ranks, on_ranks
from .tiny_cases import CASES
from .tiny_model import one_tensor_per_expert

TYPES = ("IQ4_K", "IQ4_KS", "IQ4_K_R4")
SHARES = ((1, 1), (1, 1, 1), (3, 1))
TRAINED = ("demo-llama", "mini-llama", "mini-deepseek", "mini-qwen3moe", "mini-qwen35moe")
BOUND = 1e-3  # largest difference of logits
QUICK = (
    *("llama", "qwen3_moe", "deepseek_v3", "deepseek_v4", "qwen3_next", "gpt_oss", "gemma4_moe"),
    "phi3",
)


def cases(names) -> list:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in names]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    yield Models(folder)
    shutil.rmtree(folder)


def check(path, tokens, shares, switches=Switches(), **options) -> None:
    with load_model(path, switches=switches) as model:
        expected = model.forward(tokens)
        plan = make_plan(model.source, shares, switches, **options)
    first, *others = logits_on_ranks(path, tokens, plan, switches=switches)
    torch.testing.assert_close(first, expected, rtol=0, atol=BOUND)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", cases(CASES))
def test_ranks_compute_quantized_models(models, case):
    number = list(CASES).index(case)
    type = TYPES[number % len(TYPES)]
    path = models.quantized(case, type)
    for shares in SHARES:
        check(path, models.tiny(case, "wide").tokens, shares)


@pytest.mark.parametrize("case", cases(WITH_EXPERTS))
def test_experts_are_split_in_every_way(models, case):
    tokens = models.tiny(case, "wide").tokens
    for merged in (False, True)[: 1 if case in NO_GATES else 2]:
        path = models.quantized(case, "Q8_0", merged)
        for experts in ("columns", "whole"):
            check(path, tokens, (1, 2), experts=experts)
    check(models.quantized(case, "Q8_0"), tokens, (1, 1, 1), Switches(merge_gate_up=True))


@pytest.mark.parametrize("shares", [(1, 1, 1), (0, 1)])
@pytest.mark.parametrize("case", cases(CASES))
def test_sequences_on_ranks_are_those_on_one(models, case, shares):
    """Prompts in two pieces, then tokens one by one, with caches in f16."""
    path, tokens = models.file(case, "small"), models.tiny(case, "small").tokens
    pieces = np.split(np.asarray(tokens), [11, 30, 31, 32])[:4]

    def run(model: Model) -> torch.Tensor:
        state = model.new_state(64, CacheSettings())
        return torch.stack([model.extend(piece, state) for piece in pieces])

    with load_model(path) as model:
        expected = run(model)
        plan = make_plan(model.source, shares)

    def work(rank: int, meeting: ThreadMeeting) -> torch.Tensor:
        with Model(open_gguf(path), share=Share(plan, rank, meeting)) as model:
            return run(model)

    for found in on_ranks(len(shares), work):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("mla", [1, 3])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_every_layout_of_latent_attention_is_split(tmp_path, name, mla):
    for path in layouts(tmp_path, name).values():
        check(path, np.arange(30), (1, 1, 1), Switches(mla=mla))


@pytest.mark.parametrize("experts", ["columns", "whole"])
def test_experts_in_tensors_of_their_own_are_split(tmp_path, experts):
    """As in very old files."""
    with open_gguf(shared("golden/convert/mixtral/expected-f32.gguf")) as source:
        path = one_tensor_per_expert(tmp_path / "old.gguf", source)
    check(path, np.arange(20), (1, 1, 1), experts=experts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "demo-llama" else [pytest.mark.full])
        for name in TRAINED
    ],
)
def test_ranks_compute_trained_models(tmp_path, name):
    path = tmp_path / "quantized.gguf"
    iqforge.quantize_model(shared(f"models/{name}"), path, "IQ4_KS")
    for shares in SHARES:
        check(path, np.arange(100, 140), shares)


@pytest.fixture(scope="module")
def files(models, tmp_path_factory) -> dict[Path, list[int]]:
    """Files of every class and of trained models, each with the tokens to evaluate."""
    found = {}
    for name in GOLDEN:
        tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"][:24]
        found[Path(shared(f"golden/convert/{name}/expected-f32.gguf"))] = tokens.tolist()
    for number, case in enumerate(CASES):
        tokens = np.asarray(models.tiny(case, "wide").tokens).tolist()
        found[models.quantized(case, TYPES[number % len(TYPES)])] = tokens
        if case in WITH_EXPERTS:
            found[models.quantized(case, TYPES[(number + 1) % len(TYPES)], True)] = tokens
    folder = tmp_path_factory.mktemp("trained")
    for name in TRAINED:
        path = folder / f"{name}.gguf"
        iqforge.quantize_model(shared(f"models/{name}"), path, "IQ4_KS")
        found[path] = list(range(100, 140))
    return found


@pytest.mark.parametrize(
    "device, size, shares",
    [
        pytest.param("cpu", 2, ("1,1", "3,1"), marks=pytest.mark.full),
        pytest.param("cpu", 3, ("1,1,1", "3,1,2"), marks=pytest.mark.full),
        pytest.param("cpu", 8, ("1,1,1,1,1,1,1,1",), marks=pytest.mark.full),
        pytest.param("cuda", 2, ("1,1", "3,1"), marks=pytest.mark.gpu),
        pytest.param("cuda", 4, ("1,1,1,1", "3,1,2,2"), marks=pytest.mark.gpu),
    ],
)
def test_processes_compute_every_file(request, device, size, shares, tmp_path):
    """Processes that meet through gloo, or through NCCL, of which some hold nothing of a layer: the
    same digits on all of them and twice, and the logits of one process.
    """
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    files = request.getfixturevalue("files")  # which takes long to make
    jobs = [
        {"path": str(path), "tokens": tokens, "shares": one, "mode": mode, "device": device}
        for path, tokens in files.items()
        for one in shares
        for mode in ("graph", "layer")
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    program = str(Path(__file__).with_name("parallel_program.py"))
    assert run_ranks([sys.executable, program, "files", str(tmp_path)], size) == 0
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(size)]
    assert all(all(json.loads((tmp_path / f"{r}.json").read_text())) for r in range(size))
    for path, tokens in files.items():
        with load_model(path, device=device, precision="f32") as model:
            wanted = model.forward(np.array(tokens)).cpu().numpy()
        for number, job in enumerate(jobs):
            if job["path"] == str(path):
                first, *others = (rank[f"arr_{number}"] for rank in ranks)
                np.testing.assert_allclose(first, wanted, rtol=0, atol=BOUND, err_msg=str(job))
                assert all(np.array_equal(first, other) for other in others), job


def test_inputs_of_products_are_those_of_whole_models():
    with open_gguf(shared("golden/convert/llama/expected-f32.gguf")) as source:
        meeting = ThreadMeeting(0, [], threading.Barrier(2), {})
        share = Share(make_plan(source, (1, 1)), 0, meeting)
        model = Model(source, share=share)
        with pytest.raises(UsageError, match="a part of the model"), model.observe(print):
            pass
        with model.observe(print, reads=False):
            pass

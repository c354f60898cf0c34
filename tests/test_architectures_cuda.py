"""Random tiny models of every class on a GPU: float32 against the CPU, and the fast path against
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import iqforge
import numpy as np
import pytest
import torch
from iqforge.quantize.plan.recipe import Recipe
from iqforge.runtime.architectures import architectures
from iqforge.runtime.model import load_model
from iqforge.runtime.network.sampling import GREEDY
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.placement import Request, parse_overrides

from . import golden
from .choices import by_token, comparable, recorded
from .shared import shared
from .tiny_cases import CASES, N_TOKENS, WIDE
from .tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PROMPTS, ENOUGH = 4, 40  # texts, and tokens of all of them that have to be compared
PIECES = [20, 8, 1, 1, 1, 1, 8]
# Cases in which weights of experts jump where a score passes a limit (`sparse_mixer`), with the
# same choice of experts.
JUMPS = ("phimoe",)
# Cases whose steps of time and gates come from products that the CPU computes with rounded
# activations, one after the other: how much further from float32 they may be than others.
SENSITIVE = {"mamba": 3, "falcon_mamba": 3}


class Made(NamedTuple):
    """A Q8_0 file, token ids of some texts, and logits and choices of each on the CPU."""

    case: object
    file: object
    texts: list[list[int]]
    logits: list[torch.Tensor]
    choices: list[list[torch.Tensor]]


@pytest.fixture(scope="module", params=list(CASES))
def made(request, tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("transformers")
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    tiny = make_tiny_model(case, WIDE, folder / "hf")
    iqforge.convert_model(tiny.folder, folder / "f32.gguf", "f32")
    iqforge.quantize_model(folder / "f32.gguf", folder / "q.gguf", Recipe("Q8_0", pure=True))
    random = torch.Generator().manual_seed(tiny.seed)
    texts = [tiny.tokens]
    while len(texts) < PROMPTS:
        texts.append(torch.randint(2, 300, (N_TOKENS,), generator=random).tolist())
    logits, choices = [], []
    with pytest.MonkeyPatch.context() as patch, load_model(folder / "q.gguf") as model:
        for tokens in texts:
            with recorded(patch) as found:
                logits.append(model.forward(tokens))
            choices.append(by_token(found, [N_TOKENS]))
    return Made(case, folder / "q.gguf", texts, logits, choices)


def test_float32_is_the_cpu_s(made):
    tokens, expected = made.texts[0], made.logits[0]
    with load_model(made.file, device=DEVICE, precision="f32") as model:
        first, second = model.forward(tokens).cpu(), model.forward(tokens).cpu()
    assert torch.equal(first, second)
    assert (first - expected).abs().max() < 1e-3 * expected.abs().max()


def at_once(model, tokens: list[int]) -> torch.Tensor:
    return model.forward(tokens).cpu()


def in_pieces(model, tokens: list[int], cache: CacheSettings = CacheSettings()) -> torch.Tensor:
    state, parts = model.new_state(64, cache), torch.tensor(tokens).split(PIECES)
    return torch.cat([model.extend(part, state, all_logits=True).cpu() for part in parts])


def in_float32(model, tokens: list[int]) -> torch.Tensor:
    """In pieces, keys and values as exact as at once: rounded ones can change a close choice of
    experts.
    """
    return in_pieces(model, tokens, CacheSettings("f32", "f32"))


WAYS = (at_once, in_pieces)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_the_fast_path_is_near_float32(made, precision, monkeypatch):
    """At once, and in pieces of a kept sequence of which some are steps. No layer is slow of which
    kernels are said to evaluate everything.

    Every token is compared for which all routers and indexers chose as in float32, and did so for
    all tokens that it sees. Steps round activations to 8 bits: on the reference path with such
    rounding, tokens of the deepest model (gemma3) are off by 0.021 on average and 0.032 at most.
    """
    slow: list[str] = []
    options = {"device": DEVICE, "precision": precision}
    with load_model(made.file, verbose=slow.append, **options) as model:
        found, again = (
            [[way(model, text) for way in WAYS] for text in made.texts] for _ in range(2)
        )
    for one, other in zip(found, again, strict=True):
        assert all(map(torch.equal, one, other))
    if architectures()[made.case.architecture].gpu:
        assert not slow

    compared = [0, 0]
    with recorded(monkeypatch) as calls, load_model(made.file, **options) as model:
        for number, (tokens, expected) in enumerate(zip(made.texts, made.logits, strict=True)):
            for way, pieces in enumerate(([N_TOKENS], PIECES)):
                calls.clear()
                logits = WAYS[way](model, tokens)
                assert torch.equal(logits, found[number][way])  # graphs compute the same
                same = comparable(by_token(calls, pieces), made.choices[number], N_TOKENS)
                compared[way] += int(same.sum())
                off = (logits - expected).square().mean(1).sqrt() / expected.std()
                if made.case.name in JUMPS:
                    same &= off <= off.quantile(0.5)
                mean = off[same].square().mean().sqrt() if same.any() else torch.zeros(())
                assert mean < 0.03 and (off[same] < 0.06).all(), (number, way, same, off)
    assert min(compared) >= (ENOUGH // 2 if made.case.name in JUMPS else ENOUGH), compared


def test_a_snapshot_brings_a_sequence_back(made):
    """Also after steps that ran ahead, which write recurrent states in turns."""
    tokens = made.texts[0]
    with load_model(made.file, device=DEVICE, precision="f16") as model:
        state = model.new_state(64, CacheSettings())
        model.extend(tokens[:20], state)
        snapshot, runs = state.snapshot(), []
        for _ in range(2):
            drawn = list(model.follow(tokens[20], state, 5, GREEDY))
            runs.append((drawn, model.extend(tokens[21:29], state).cpu()))
            state.restore(snapshot)
    (first, logits), (second, again) = runs
    assert first == second and torch.equal(logits, again)


PLACEMENTS = (
    Request(gpu_layers=1),
    Request(overrides=parse_overrides(r"blk\.1\.=CPU")),
    Request(
        overrides=parse_overrides(
            r"attn_(output|k|v|q_b|k_b|v_b)\.=CPU,ffn_down=CPU,(ssm_out|out_proj)=CPU"
        )
    ),
    Request(cpu_experts=99),
)


def test_what_stays_on_the_cpu(made):
    """Layers and matrices on two devices: in float32 the CPU's logits, and next to layers on
    kernels the same twice, and near these. Layers on the CPU round activations to 8 bits, in
    prompts too: that can change an early choice of experts, and with it the rest of a text. So of
    models with choices a quarter of the tokens that steps evaluate is near, and half of the others.
    Without choices steps are off by 0.031 at most (gemma4_e, one layer on the GPU).
    """
    tokens, expected = made.texts[0], made.logits[0]
    for placement in PLACEMENTS:
        with load_model(made.file, device=DEVICE, precision="f32", placement=placement) as model:
            names = [p.name for p in model.weights.parameters]
            if placement.cpu_experts and not any("_exps" in name for name in names):
                continue
            assert {p.device.type for p in model.weights.parameters} == {"cpu", DEVICE}
            for way in (at_once, in_float32):
                off = (way(model, tokens) - expected).abs().max()
                assert off < 1e-3 * expected.abs().max(), (placement, way)
        with load_model(made.file, device=DEVICE, precision="f16", placement=placement) as model:
            found = [in_pieces(model, text) for text in made.texts]
            assert torch.equal(in_pieces(model, tokens), found[0]), placement
        off = torch.stack(
            [
                (one - other).square().mean(1).sqrt() / other.std()
                for one, other in zip(found, made.logits, strict=True)
            ]
        )
        prompts, steps = off[:, : PIECES[0]], off[:, PIECES[0] :]
        if any(made.choices):
            near = prompts.quantile(0.5), 4 / 3 * steps.quantile(0.25)
        else:  # nothing that rounding can change
            near = prompts.quantile(0.5, dim=1).max(), steps.quantile(0.5, dim=1).max()
        by = SENSITIVE.get(made.case.name, 1)
        assert near[0] < by * 0.03 and near[1] < by * 0.04, (placement, near, off)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", golden.CASES)
def test_golden_models_in_float32(case):
    """At once and token by token: the CPU's logits, and those of transformers."""
    expected = np.load(shared(f"golden/convert/{case}/logits.npz"))
    tokens, path = expected["input_ids"], shared(f"golden/convert/{case}/expected-f32.gguf")
    with load_model(path) as model:
        on_cpu = model.forward(tokens)
    with load_model(path, device=DEVICE, precision="f32") as model:
        at_once = model.forward(tokens).cpu()
        state = model.new_state(len(tokens), CacheSettings("f32", "f32"))
        in_steps = torch.stack([model.extend([token], state).cpu() for token in tokens])
    bound = 1e-3 * on_cpu.abs().max()
    for logits in (at_once, in_steps):
        assert (logits - on_cpu).abs().max() < bound
        assert (logits - torch.from_numpy(expected["logits"])).abs().max() < bound

"""Many rows at once on the fast path: the logits of the reference path, within the error of 16-bit
activations, and the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from iqforge.cuda_kernels.prompt import flash_plan
from iqforge.runtime.bench.shapes import SHAPES
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.bench.write import write_random_model
from iqforge.runtime.cuda.prompt.locked import Pieces
from iqforge.runtime.cuda.prompt.mixers import scores as prompt_scores
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.placement import ALL, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LIMITS = {"bf16": 0.02, "f16": 0.004}


def tokens() -> torch.Tensor:
    return torch.randint(0, 512, (2, 150), generator=torch.Generator().manual_seed(5))


def model(spec: str, **options) -> Model:
    return Model(SyntheticSource(spec), "cuda", **options)


def logits(m: Model) -> torch.Tensor:
    return m.logits(m.hidden(tokens()).flatten(0, 1))


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the error of a typical row, as near ties between experts may be decided either way."""
    assert x.isfinite().all()
    return ((x - truth).norm(dim=-1) / truth.norm(dim=-1)).median().item()


@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:IQ4_K", "qwen3moe-tiny:Q8_0"])
def test_agrees_with_the_reference_path(spec):
    with model(spec, precision="f32") as m:
        truth = logits(m)
    for precision, limit in LIMITS.items():
        with model(spec, precision=precision) as m:
            found = logits(m)
            assert error(found, truth) < limit
            assert torch.equal(logits(m), found)


@pytest.mark.parametrize(
    "settings", [CacheSettings(), CacheSettings("q8_0", "q8_0", True, True)], ids=lambda s: s.type_k
)
@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "every-expert:IQ4_K"])
def test_pieces_of_a_sequence(monkeypatch, spec, settings):
    """A prompt in passes of 64, with one row at the end, agrees with a single pass in float32 with
    the same cache. Every expert is used: a near tie that is decided otherwise shows in all rows
    after it.
    """
    moe = SHAPES["qwen3moe-tiny"]
    monkeypatch.setitem(SHAPES, "every-expert", replace(moe, n_used=moe.n_experts))
    row = tokens()[0]
    with model(spec, precision="f32", cache=settings) as m:
        truth = m.extend(row, m.new_state(200), all_logits=True)
    with model(spec, precision="f16", cache=settings, ubatch=64) as m:
        state = m.new_state(200)
        assert error(m.extend(row, state, all_logits=True), truth) < 2 * LIMITS[
            "f16"
        ] and state.n_past == len(row)
        # The last row's product is another kernel.
        assert error(m.extend(row, m.new_state(200))[None], truth[-1:]) < 5 * LIMITS["f16"]


@pytest.mark.parametrize("value_head", [32, 96])
def test_values_of_another_length(monkeypatch, value_head):
    """In pieces and steps, without a slow layer."""
    shape, slow = replace(SHAPES["llama-tiny"], value_head=value_head), []
    monkeypatch.setitem(SHAPES, "other-values", shape)
    row = tokens()[0]
    with model("other-values:Q8_0", precision="f32") as m:
        truth = logits(m)
    with model("other-values:Q8_0", precision="f16", verbose=slow.append) as m:
        assert error(logits(m), truth) < LIMITS["f16"]
        state = m.new_state(200)
        parts = [m.extend(x, state, all_logits=True) for x in row.split([100, 40, 1, 1, 8])]
        assert error(torch.cat(parts), truth[: len(row)]) < 5 * LIMITS["f16"]
    assert not slow


def test_a_vocabulary_that_is_no_multiple_of_8(monkeypatch):
    """Logits of all rows, of the last one, and of steps, without a slow layer."""
    monkeypatch.setitem(SHAPES, "odd", replace(SHAPES["llama-tiny"], n_vocab=509))
    row, slow = tokens()[0] % 509, []
    with model("odd:Q8_0", precision="f32") as m:
        truth = m.forward(row)
    with model("odd:Q8_0", precision="f16", verbose=slow.append) as m:
        assert error(m.forward(row), truth) < LIMITS["f16"]
        state = m.new_state(200)
        parts = [m.extend(x, state, all_logits=True) for x in row.split([100, 40, 1, 1, 8])]
        assert error(torch.cat(parts), truth) < 5 * LIMITS["f16"]
    assert not slow


def test_fused_experts_are_those_decoded_first(monkeypatch):
    """On Hopper, products read packed weights, with the same rounding of weights and another order
    of additions.
    """
    from iqforge.cuda_kernels.prompt import grouped as prompt_grouped

    with model("qwen3moe-tiny:IQ4_K") as m:
        fused = logits(m)
    monkeypatch.setattr(prompt_grouped, "gate_up_fits", lambda *_: False)
    with model("qwen3moe-tiny:IQ4_K") as m:
        assert error(logits(m), fused) < LIMITS["bf16"]


def test_all_flash_attentions_agree(monkeypatch):
    """That of Hopper, FlashAttention-2, and cuDNN's, if torch has it."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    with model("llama-tiny:Q8_0", precision="f16") as m:
        first = logits(m)
        monkeypatch.setattr(flash_plan, "fits", lambda *_: False)
        other = logits(m)
        assert error(other, first) < 0.002 and not torch.equal(other, first)
        monkeypatch.setattr(prompt_scores, "CUDNN_ROWS", 1)
        assert error(logits(m), first) < 0.002


@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:IQ4_K"])
def test_graphs_give_the_bits_they_were_captured_from(monkeypatch, spec):
    """Passes of 50 rows, which are full ones, and others run eagerly, captured, replayed, and after
    others took their place.
    """
    from iqforge.runtime.cuda.prompt.common import graphs as prompt_graphs

    lengths = (150, 49, 49, 49, 150, 30, 30, 30, 49, 49, 49)
    with monkeypatch.context() as patch, model(spec, ubatch=50) as m:
        patch.setattr(prompt_graphs, "can_capture", lambda device: False)
        expected = {
            (n, every): m.extend(tokens()[0][:n], m.new_state(200), all_logits=every)
            for n in set(lengths)
            for every in (True, False)
        }
    with model(spec, ubatch=50) as m:
        for n in lengths:
            for every in (True, False):
                assert torch.equal(
                    m.extend(tokens()[0][:n], m.new_state(200), all_logits=every),
                    expected[n, every],
                )
            kept = m.engine.prompt._graphs._kept
            assert len(kept) <= prompt_graphs.MOST_KINDS
            assert all(len(graphs._captured) == 3 for graphs in kept.values())


@pytest.fixture(params=["IQ4_K", "Q8_0"])
def on_disk(request, tmp_path, monkeypatch) -> Path:
    """A model in a file: random rows of a source are mapped, and cannot be page-locked."""
    four = replace(SHAPES["qwen3moe-tiny"], n_layers=4)
    monkeypatch.setitem(SHAPES, "qwen3moe-four", four)
    return write_random_model(f"qwen3moe-four:{request.param}", tmp_path / "four.gguf")


def offloaded(path: Path, **options) -> Model:
    return load_model(path, "cuda", placement=Request(cpu_experts=ALL), **options)


def test_experts_on_the_cpu_give_the_same_bits_locked_or_not(monkeypatch, on_disk):
    copied, real = [], Pieces.pack_into

    def pack_into(pieces, *arguments):
        copied.append(arguments)
        real(pieces, *arguments)

    monkeypatch.setattr(Pieces, "pack_into", pack_into)
    with offloaded(on_disk) as m:
        locked = logits(m)
        assert copied  # else nothing could be locked
        assert torch.equal(logits(m), locked)
    copied.clear()
    monkeypatch.setenv("IQFORGE_LOCK", "0")
    with offloaded(on_disk) as m:
        assert torch.equal(logits(m), locked)
        assert not copied


def test_pieces_of_a_prompt_share_copies_of_experts(monkeypatch, on_disk):
    ids = tokens()[0]
    with offloaded(on_disk, ubatch=64) as m:
        assert m.tokens_together > len(ids)
        together = m.extend(ids, m.new_state(160), all_logits=True)
        last = m.extend(ids, m.new_state(160))
        monkeypatch.setattr(m.engine.prompt, "most_together", 1)
        apart = m.extend(ids, m.new_state(160), all_logits=True)
    for found, expected in ((together[:128], apart[:128]), (last[None], together[-1:])):
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(errors.median()) < 0.01

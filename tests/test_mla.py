"""Latent attention: its two forms, its layouts in files, sequences, and the positions that an
indexer chooses.
"""

from __future__ import annotations

from dataclasses import replace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.formats.gguf.reader import open_gguf
from iqforge.runtime.architectures.deepseek2 import with_groups
from iqforge.runtime.cuda.common.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.layers.indexer import best_positions
from iqforge.runtime.layers.specs import RouterSpec
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.weights.switches import Switches

from . import prompt_on_cpu
from .latent_models import BOUND, CASES, F32, golden, in_pieces, layouts, logits
from .shared import shared
from .step_graphs_on_cpu import CPU
from .tiny_cases import CASES as TINY
from .tiny_cases import SMALL
from .tiny_models import make_tiny_model


@pytest.fixture(scope="module", params=CASES)
def case(request):
    with load_model(golden(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(0, 288, 150).tolist()


@pytest.mark.parametrize("name", CASES)
def test_naive_and_absorbed_are_the_same(name, tokens):
    """More tokens than are absorbed, so that 2 and 3 are naive, and fewer."""
    for n in (20, 150):
        naive, absorbed, *chosen = (
            logits(golden(name), tokens[:n], switches=Switches(mla=mla)) for mla in (0, 1, 2, 3)
        )
        assert (naive - absorbed).abs().max() < 1e-5
        assert not torch.equal(naive, absorbed)
        for found in chosen:
            assert torch.equal(found, absorbed if n < 128 else naive)


def test_only_who_reads_inputs_changes_the_form(tokens):
    with load_model(golden("deepseek_v3"), switches=Switches(mla=0)) as model:
        naive = model.forward(tokens[:20])
        with model.observe(lambda name, x, experts: None, reads=False):
            assert torch.equal(model.forward(tokens[:20]), naive)
        with model.observe(lambda name, x, experts: None):
            observed = model.forward(tokens[:20])
        assert torch.equal(model.forward(tokens[:20]), naive)
    absorbed = logits(golden("deepseek_v3"), tokens[:20], switches=Switches(mla=1))
    assert torch.equal(observed, absorbed) and not torch.equal(observed, naive)


def test_scores_in_memory_are_the_same(tokens):
    for case in ("deepseek_v3", "glm_moe_dsa"):
        for mla in (0, 1):
            plain, *others = (
                logits(golden(case), tokens, switches=Switches(flash, most, mla=mla))
                for flash, most in ((True, 0), (False, 1), (False, 0), (True, 1))
            )
            for found in others:
                assert (plain - found).abs().max() < 1e-5


def test_keys_and_values_of_heads_fit_the_buffer(tokens):
    """The naive form takes as many heads at a time as fit, and the numbers stay."""
    switches, found, widths = Switches(attention_buffer=1, mla=0), [], []
    more = tokens * 7
    for chosen in (Switches(mla=0), switches):
        with load_model(golden("deepseek_v2"), switches=chosen) as model:
            up = model.network.blocks[0].mixer.up
            plain = up.keys_and_values

            def seen(c, heads, plain=plain):
                k, v = plain(c, heads)
                widths.append(k.shape[1])
                return k, v

            up.keys_and_values = seen
            found.append(model.forward(more))
    assert widths == [4, 2, 2]  # 1050 positions of a head take 4 * (24 + 16 + 2 * 40) bytes each
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize("mla", [0, 1])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_every_layout_is_the_same_model(tmp_path, tokens, name, mla):
    files = layouts(tmp_path, name)
    with open_gguf(files["all"]) as file:
        shapes = {tensor.name: len(tensor.shape) for tensor in file.tensors}
    assert shapes["blk.0.attn_k_b.weight"] == 2 and shapes["blk.0.attn_kv_b.weight"] == 2
    found = {
        layout: logits(path, tokens[:30], switches=Switches(mla=mla))
        for layout, path in files.items()
    }
    if name == "deepseek_v3":  # ik_llama.cpp's layout has no groups of experts
        assert (found["per head"] - found["all"]).abs().max() > 0.1
    else:
        assert (found["per head"] - found["all"]).abs().max() < BOUND
    assert (found["joined"] - found["all"]).abs().max() < BOUND


@pytest.mark.parametrize(
    "magnitudes",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"attention_factor": 1.3},
        {"attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
)
def test_magnitudes_of_yarn(tmp_path, magnitudes):
    """Of the rotation, and of scores, against transformers."""
    plain = TINY["deepseek_v2_lite"]

    def config(sizes):
        whole = plain.config(sizes)
        rope = {k: v for k, v in whole["rope_parameters"].items() if not k.startswith("mscale")}
        return whole | {"rope_parameters": rope | magnitudes}

    tiny = make_tiny_model(replace(plain, config=config), SMALL, tmp_path / "hf")
    iqforge.convert_model(tiny.folder, tmp_path / "f32.gguf", "f32")
    found = logits(tmp_path / "f32.gguf", tiny.tokens).numpy()
    assert np.abs(found - tiny.logits).max() < BOUND, tiny


def test_pieces_are_the_whole(case, tokens):
    tokens = tokens[:40]
    whole = case.forward(tokens)
    for sizes in ([40], [1] * 40, [7, 1, 20, 12]):
        assert (in_pieces(case, tokens, sizes) - whole).abs().max() < BOUND
    case.ubatch = 9
    try:
        assert (in_pieces(case, tokens, [40]) - whole).abs().max() < BOUND
    finally:
        case.ubatch = 512


def test_a_long_prompt_and_steps_agree(case, tokens):
    """The prompt is naive and the steps are absorbed."""
    whole = case.forward(tokens)
    assert (in_pieces(case, tokens, [140, *[1] * 10]) - whole).abs().max() < BOUND


def test_sequences_of_unequal_length_together(case, tokens):
    """One of them with enough tokens for the naive form."""
    pool = case.new_pool(400, 3, F32)
    texts = [tokens[:135], tokens[50:61], tokens[30:31]]
    states = [pool.sequence() for _ in texts]
    first = case.extend_together([(t, s) for t, s in zip(texts, states, strict=True)])
    more = [tokens[7:8], tokens[9:14], tokens[3:10]]
    second = case.extend_together([(t, s) for t, s in zip(more, states, strict=True)])
    for i, (text, end) in enumerate(zip(texts, more, strict=True)):
        alone = case.forward(text + end)
        assert (first[i] - alone[len(text) - 1]).abs().max() < BOUND
        assert (second[i] - alone[-1]).abs().max() < BOUND


def test_going_back(case, tokens):
    """A sequence that was cut, restored, or left and continued is as if that had not been."""
    tokens = tokens[:30]
    state = case.new_state(64, F32)
    case.extend(tokens[:20], state)
    snapshot = state.snapshot()
    whole = case.extend(tokens[20:], state, all_logits=True)
    state.truncate(10)
    case.extend([5] * 8, state)
    state.restore(snapshot)
    assert torch.equal(case.extend(tokens[20:], state, all_logits=True), whole)
    state.truncate(20)
    assert torch.equal(case.extend(tokens[20:], state, all_logits=True), whole)


def test_runs_repeat_to_the_last_digit(case, tokens):
    assert torch.equal(case.forward(tokens), case.forward(tokens))


def test_memory_is_what_the_cache_takes(case):
    for settings in (F32, CacheSettings("f16"), CacheSettings("bf16", "q8_0")):
        state = case.new_state(256, settings)
        stated = sum(block.mixer.state_bytes(256, settings) for block in case.network.blocks)
        assert state.nbytes == stated
    s = case.network.blocks[0].mixer.spec
    per_layer = 256 * (s.rope_length + s.kv_rank) * 4
    assert case.new_state(256, F32).layers[-1].rows.nbytes == per_layer
    assert all(m.total > 0 for m in case.memory(context=256))


def test_best_positions():
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.0], [3.0, 1.0, 2.0, 0.0]])
    assert best_positions(scores, 2).tolist() == [
        [True, False, True, False],  # the last of three positions it sees is better than the second
        [True, False, True, False],
    ]
    torch.manual_seed(0)
    scores = torch.randn(20, 20).relu()  # with equals
    whole = best_positions(scores, 6)
    assert (whole.sum(1) == torch.arange(1, 21).clamp(max=6)).all()
    for n in range(1, 21):
        assert torch.equal(best_positions(scores[n - 1 : n, :n], 6)[0], whole[n - 1, :n])


def test_dense_attention_instead_of_sparse():
    expected = np.load(shared("golden/convert/glm_moe_dsa/logits.npz"))
    for sparse, name in ((True, "logits"), (False, "logits_dense")):
        for mla in (0, 1):
            found = logits(
                golden("glm_moe_dsa"),
                expected["input_ids"],
                switches=Switches(mla=mla, sparse_attention=sparse),
            )
            assert np.abs(found.numpy() - expected[name]).max() < BOUND


def test_groups_of_files_without_keys_for_them():
    """Those of released models; the tiny one has other sizes and gets none."""
    v3, v2 = RouterSpec(256, 8, "sigmoid"), RouterSpec(160, 6, "softmax")
    assert with_groups(v3, False) == replace(v3, groups=8, groups_used=4)
    assert with_groups(v2, False) == replace(v2, groups=8, groups_used=3, group_best=1)
    for other in (RouterSpec(384, 8, "sigmoid"), RouterSpec(64, 6, "softmax", group_best=1)):
        assert with_groups(other, False) == other
    known = replace(v3, groups=4, groups_used=1)
    assert with_groups(known, True) == known


@pytest.mark.parametrize("name", CASES)
def test_layers_without_kernels_beside_the_fast_path(monkeypatch, name, tokens):
    """A prompt in passes of 9 tokens and steps. A choice of positions serves later layers."""
    expected, tokens = logits(golden(name), tokens[:40]), tokens[:40]
    prompt_on_cpu.install(monkeypatch)
    told: list[str] = []
    with load_model(golden(name)) as model:
        context = Context(CPU, torch.float16, F32, ubatch=9, verbose=told.append)
        engine, state = Engine(model.network, context), model.new_state(len(tokens), F32)
        found = [engine.extend(torch.tensor(tokens[:30]), state, True)]
        found += [engine.extend(torch.tensor([token]), state, True) for token in tokens[30:]]
    assert any("MLA" in line for line in told)
    assert (torch.cat(found) - expected).abs().max() < BOUND

"""Latent attention: its two forms, its layouts in files, its cache, and the positions that an
indexer chooses.
"""

from __future__ import annotations

import json
from dataclasses import replace

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import UsageError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.tensor_names import TensorName
from iqforge.imatrix.collector import collect
from iqforge.imatrix.files.load import load_imatrix, save_imatrix
from iqforge.runtime.architectures.deepseek2 import with_groups
from iqforge.runtime.cuda.context import Context
from iqforge.runtime.cuda.engine import Engine
from iqforge.runtime.layers.indexer import best_positions
from iqforge.runtime.layers.specs import RouterSpec
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.cache_types import CACHE_TYPES
from iqforge.runtime.switches import Switches

from . import prompt_on_cpu
from .shared import shared
from .step_on_cpu import CPU
from .tiny_model import write_gguf
from .tiny_models import CASES as TINY
from .tiny_models import SMALL, make_tiny_model

CASES = ("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "mistral4")
F32 = CacheSettings("f32", "f32")
BOUND = 1e-4


def golden(case: str):
    return shared(f"golden/convert/{case}/expected-f32.gguf")


def logits(path, tokens, **options) -> torch.Tensor:
    with load_model(path, **options) as model:
        return model.forward(tokens)


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


def layouts(folder, case: str) -> dict[str, str]:
    """Files of one model with k_b and v_b per head, with kv_b alone, and with all of them."""
    hf, made = shared(f"golden/convert/{case}/hf"), {}
    for name, layout, drop in (
        ("per head", "mainline", ()),
        ("all", "ik", ()),
        ("joined", "ik", tuple(f"blk.{i}.attn_{x}_b.weight" for i in (0, 1) for x in "kv")),
    ):
        with CheckpointSource(open_checkpoint(hf), mla_layout=layout) as source:
            made[name] = write_gguf(folder / f"{case}-{name}.gguf", source, drop=drop)
    return made


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


def in_pieces(model, tokens, sizes, settings=F32) -> torch.Tensor:
    state, rows = model.new_state(len(tokens), settings), []
    for size in sizes:
        rows.append(model.extend(tokens[state.n_past :][:size], state, all_logits=True))
    assert state.n_past == len(tokens)
    return torch.cat(rows)


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


# --- importance matrices


class FirstLayer:
    """What latent attention of the first layer multiplies, in plain float64 from the definitions:
    `q` [tokens, heads, nope + rope] before rotation, latent vectors `c`, `mixed` [tokens, heads,
    rank].
    """

    def __init__(self, path, tokens):
        with open_gguf(path) as file:
            key = {k.partition(".")[2]: v.data for k, v in file.metadata.items()}
            w = {
                t.name.removeprefix("blk.0."): decode(
                    t.type, np.array(file.read_rows(t, 0, t.n_rows)), t.n_cols
                )
                .reshape(t.shape)
                .astype(np.float64)
                for t in file.tensors
            }
        heads, n_rot = key["attention.head_count"], key["rope.dimension_count"]
        rank, length = key["attention.kv_lora_rank"], key["attention.key_length_mla"]

        def norm(x, name):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name].reshape(-1)

        def turned(x):
            rates = key["rope.freq_base"] ** (-2 * np.arange(n_rot // 2) / n_rot)
            angle = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) * rates
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

        x = norm(w["token_embd.weight"][tokens], "attn_norm.weight")
        self.x = x
        self.q_latent = norm(x @ w["attn_q_a.weight"].T, "attn_q_a_norm.weight")
        self.q = (self.q_latent @ w["attn_q_b.weight"].T).reshape(len(x), heads, length)
        both = x @ w["attn_kv_a_mqa.weight"].T
        self.c = norm(both[:, :rank], "attn_kv_a_norm.weight")
        k_rope, q_rope = turned(both[:, rank:]), turned(self.q[..., -n_rot:])
        k = np.einsum("nr,hrk->nhk", self.c, w["attn_k_b.weight"])
        scores = np.einsum("nhk,mhk->hnm", self.q[..., :-n_rot], k)
        scores += np.einsum("nhk,mk->hnm", q_rope, k_rope)
        scores = np.where(np.tri(len(x), dtype=bool), scores / length**0.5, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        self.mixed = np.einsum("hnm,mr->nhr", shares, self.c)
        self.nope = length - n_rot


@pytest.fixture(scope="module")
def without_scaling(tmp_path_factory):
    """The layouts of a model whose rotation has no scaling."""
    folder, made = tmp_path_factory.mktemp("layouts"), {}
    for name, path in layouts(folder, "deepseek_v3").items():
        with open_gguf(path) as source:
            scaling = {key: None for key in source.metadata if ".rope.scaling." in key}
            made[name] = write_gguf(folder / f"{name}.gguf", source, metadata=scaling)
    return made


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_importances_are_squares_of_the_absorbed_form(without_scaling, tokens, mla):
    n_ctx, tokens = 30, tokens[:60]
    with load_model(without_scaling["per head"]) as model:
        tokens[0] = tokens[n_ctx] = model.special_tokens.bos  # as every chunk begins
    layers = [FirstLayer(without_scaling["per head"], tokens[i : i + n_ctx]) for i in (0, n_ctx)]
    q, c, mixed = (
        np.concatenate([getattr(layer, name) for layer in layers]) for name in ("q", "c", "mixed")
    )
    per_head = {
        "attn_k_b": (q[..., : layers[0].nope] ** 2).sum(0),
        "attn_v_b": (mixed**2).sum(0),
    }
    latent = (c**2).sum(0, keepdims=True)
    for layout, path in without_scaling.items():
        with load_model(path, switches=Switches(mla=mla)) as model:
            found = collect(model, tokens, n_ctx=n_ctx).entries
        expected = {} if layout == "joined" else dict(per_head)
        expected |= {} if layout == "per head" else {"attn_kv_b": latent}
        names = {name for name in found if TensorName.parse(name).is_latent}
        assert names == {f"blk.{i}.{name}.weight" for i in (0, 1) for name in expected}
        for name, sums in expected.items():
            entry = found[f"blk.0.{name}.weight"]
            np.testing.assert_allclose(entry.sums, sums, rtol=1e-4)
            assert (entry.counts == len(tokens)).all()
        x, q_latent = (
            np.concatenate([getattr(layer, name) for layer in layers]) for name in ("x", "q_latent")
        )
        for name, inputs in (("attn_kv_a_mqa", x), ("attn_q_a", x), ("attn_q_b", q_latent)):
            sums = found[f"blk.0.{name}.weight"].sums[0]
            np.testing.assert_allclose(sums, (inputs**2).sum(0), rtol=1e-4)
        shared_experts = {f"blk.1.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
        assert shared_experts <= found.keys()


def test_heads_are_no_experts(without_scaling, tokens):
    """Showing every token to all experts leaves attention as it is."""
    with load_model(without_scaling["per head"]) as model:
        plain, shown = (
            collect(model, tokens[:60], n_ctx=30, cold_experts=method).entries
            for method in ("none", "all-experts")
        )
    assert plain.keys() == shown.keys()
    for name in plain:
        if TensorName.parse(name).is_latent:
            assert np.array_equal(plain[name].sums, shown[name].sums)


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_importances_of_one_layout_serve_the_others(without_scaling, tokens, tmp_path, suffix):
    shapes, matrices = {}, {}
    for layout, path in without_scaling.items():
        with load_model(path) as model:
            save_imatrix(collect(model, tokens[:60], n_ctx=30), tmp_path / f"{layout}.{suffix}")
        matrices[layout] = load_imatrix(tmp_path / f"{layout}.{suffix}")
        with open_gguf(path) as file:
            shapes[layout] = {t.name: t.shape for t in file.tensors if ".attn_" in t.name}
    for given, imatrix in matrices.items():
        for tensors in shapes.values():
            for name, shape in tensors.items():
                found = imatrix.importance(name, shape)
                if found is None:  # only queries are the input of k_b
                    assert TensorName.parse(name).is_norm or (given, ".attn_k_b." in name) == (
                        "joined",
                        True,
                    )
                else:
                    n_matrices = shape[0] if len(shape) == 3 else 1
                    assert found.shape == (n_matrices, shape[-1]) and (found > 0).all()
    # The heads of one matrix have the mean of all.
    heads = matrices["per head"].importance("blk.0.attn_k_b.weight", (4, 32, 24))
    folded = matrices["per head"].importance("blk.0.attn_k_b.weight", (4 * 32, 24))
    np.testing.assert_allclose(folded[0], heads.mean(0), rtol=1e-5)


# --- types of caches


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A model whose latent vectors begin within a block of the Hadamard transform: 32 + 96."""
    folder = tmp_path_factory.mktemp("turned")
    sizes = replace(SMALL, rotated=32, kv_rank=96)
    tiny = make_tiny_model(TINY["deepseek_v3"], sizes, folder / "hf")
    path = folder / "f32.gguf"
    iqforge.convert_model(tiny.folder, path, "f32")
    with load_model(path) as model:
        yield model, tiny.tokens


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", CACHE_TYPES)
def test_every_type_of_cache(turned, name, hadamard):
    """Naive, absorbed, in a state and without one."""
    model, tokens = turned
    bound = {"f32": 1e-4, "f16": 0.01, "bf16": 0.1}.get(name, 1.0)
    settings, exact = CacheSettings(name, hadamard_k=hadamard), model.forward(tokens)
    found = []
    for mla in (0, 1):
        with load_model(model.source.path, cache=settings, switches=Switches(mla=mla)) as other:
            found += [other.forward(tokens), in_pieces(other, tokens, [30, 5, 1, 4], settings)]
    for logits in found:  # an expert that another rounding chooses changes a row
        assert (logits - exact).abs().amax(1).median() < bound
        assert (logits - found[0]).abs().amax(1).median() < max(1e-4, bound / 10)
    assert name == "f32" or not torch.equal(found[0], exact)
    turns = hadamard and CACHE_TYPES[name].is_quantized
    assert model.new_state(8, settings).layers[0].rows.hadamard_k == (128 if turns else 0)


def test_hadamard_blocks_that_do_not_fit_are_refused(case):
    with pytest.raises(UsageError, match="no Hadamard transform|blocks of 32"):
        case.new_state(8, CacheSettings("q8_0", hadamard_k=True))


# --- commands


def run(*words) -> None:
    assert main([str(word) for word in words]) == 0


def test_commands(tmp_path, capsys):
    """Convert, collect, quantize, measure and generate."""
    text = tmp_path / "text.txt"
    text.write_bytes(shared("text/wiki.test.txt").read_bytes()[:9000])
    f32, small, imatrix = (tmp_path / name for name in ("f32.gguf", "q4_0.gguf", "x.gguf"))
    on_text = ("-f", text, "-c", 64, "--chunks", 4, "--device", "cpu")
    run("convert", shared("models/mini-deepseek"), "--outfile", f32, "--outtype", "f32")
    run("imatrix", "-m", f32, "-o", imatrix, *on_text)
    run("quantize", "--imatrix", imatrix, f32, small, "Q4_0")
    told = capsys.readouterr()
    assert "did not find" not in told.err

    def perplexity(*words) -> float:
        run("perplexity", *on_text, *words)
        return float(capsys.readouterr().out.split("PPL = ")[1].split()[0])

    plain = perplexity("-m", f32)
    assert abs(perplexity("-m", f32, "-mla", 1) / plain - 1) < 1e-5
    assert abs(perplexity("-m", f32, "-ctk", "q8_0") / plain - 1) < 0.02
    assert 0.9 < perplexity("-m", small) / plain < 1.2
    generate = ("generate", "--device", "cpu", "-p", "The capital of", "-n", 8, "--temp", 0)
    run(*generate, "-m", small)
    assert capsys.readouterr().out.startswith("The capital of")
    run(*generate, "-m", f32, "-mla", 0)
    naive = capsys.readouterr()
    run(*generate, "-m", f32, "-mla", 1, "--dsa", "off", "-ctv", "q8_0")
    absorbed = capsys.readouterr()
    assert naive.out == absorbed.out and "note" not in naive.err
    assert "note: --dsa changes nothing here" in absorbed.err
    assert "note: -ctv changes nothing here: latent attention keeps no values" in absorbed.err


def test_bench_has_both_forms(capsys):
    path = golden("deepseek_v3")
    words = ("--device", "cpu", "-p", 8, "-n", 2, "-r", 1, "-mla", "0,1", "-o", "json")
    run("bench", "-m", path, *words)
    rows = json.loads(capsys.readouterr().out)
    assert [row["mla_attn"] for row in rows] == [0, 0, 1, 1]
    with load_model(path) as model:
        # For each of 4 heads and 11 positions: a key of 24 + 16 and a value of 16.
        assert model.network.blocks[0].mixer.flop(10, 1) == 2 * 11 * 4 * (40 + 16)

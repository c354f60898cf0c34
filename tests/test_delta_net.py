"""Gated delta nets: both forms of the rule, states of sequences, and the layouts of files."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.errors import ConfigError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import u32
from iqforge.imatrix.files.load import load_imatrix
from iqforge.runtime.bench.sweep import sweep
from iqforge.runtime.layers.recurrent.delta_net import DeltaNet
from iqforge.runtime.layers.recurrent.delta_rule import by_chunks, by_steps
from iqforge.runtime.model import load_model
from iqforge.runtime.state.cache import CacheSettings
from iqforge.runtime.state.recurrent import RecurrentState

from .shared import shared
from .tiny_checkpoint import PROSE
from .tiny_model import write_gguf

CASES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
EXACT = CacheSettings("f32", "f32")  # keys and values of the attention layers as they are
BOUND = 1e-4
# One unit in the last place of an embedding changes logits of qwen3_5 by 8e-5: its third token
# leaves so little in a head (1e-4) that the norm after it multiplies rounding errors. Products of
# one row round differently from those of many.
LOOSE = {"qwen3_5": 3e-4}


def golden(case: str):
    """The file, token ids and transformers' logits float32[24, vocab] of a golden case."""
    saved = np.load(shared(f"golden/convert/{case}/logits.npz"))
    path = shared(f"golden/convert/{case}/expected-f32.gguf")
    logits = torch.from_numpy(saved["logits"])
    return path, saved["input_ids"].reshape(-1), logits.reshape(-1, logits.shape[-1])


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    assert (found - expected).abs().max() < bound


def arguments(n: int, *, slow: bool = False, seed: int = 3):
    """Random arguments of the rule for two sequences of `n` tokens and three heads."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, n, 3, 8, generator=g) for _ in range(2))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = torch.randn(2, n, 3, 5, generator=g)
    decay = -torch.rand(2, n, 3, generator=g) * (0.01 if slow else 8)
    beta = torch.rand(2, n, 3, generator=g)
    return q, k, v, decay, beta, torch.randn(2, 3, 8, 5, generator=g)


def in_numpy(q, k, v, decay, beta, memory):
    """The rule from its definition, head by head in float64."""
    q, k, v, decay, beta, memory = (x.double().numpy() for x in (q, k, v, decay, beta, memory))
    out, memory = np.zeros_like(v), memory.copy()
    for s, h in np.ndindex(v.shape[0], v.shape[2]):
        for t in range(v.shape[1]):
            memory[s, h] *= np.exp(decay[s, t, h])
            error = beta[s, t, h] * (v[s, t, h] - memory[s, h].T @ k[s, t, h])
            memory[s, h] += np.outer(k[s, t, h], error)
            out[s, t, h] = memory[s, h].T @ q[s, t, h]
    return torch.from_numpy(out), torch.from_numpy(memory)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_both_forms_are_the_rule(n, slow):
    args = arguments(n, slow=slow)
    expected = in_numpy(*args)
    for rule in (by_steps, by_chunks):
        for found, wanted in zip(rule(*args), expected, strict=True):
            assert found.dtype == torch.float32 and found.shape == wanted.shape
            assert (found.double() - wanted).abs().max() < 2e-5


def test_strong_decay_in_a_long_chunk_stays_finite():
    """Running sums of hundreds, whose exponentials are zero, must not become 0 * infinity."""
    q, k, v, decay, beta, memory = arguments(64)
    args = q, k, v, decay * 40, beta, memory
    for found, wanted in zip(by_chunks(*args), in_numpy(*args), strict=True):
        assert (found.double() - wanted).abs().max() < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    path, ids, expected = golden(case)
    with load_model(path) as model:
        found = model.forward(ids)
        assert_close(found, expected)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        assert torch.equal(model.forward(ids), found)  # the same digits
        mixers = [block.mixer for block in model.network.blocks]
        assert [isinstance(mixer, DeltaNet) for mixer in mixers] == [True, True, True, False]
        tiled = {mixer.spec.tiled for mixer in mixers if isinstance(mixer, DeltaNet)}
        assert tiled == {case != "qwen3_next"}


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_a_prompt_and_single_tokens_give_the_same(case):
    path, ids, expected = golden(case)
    with load_model(path) as model:
        for cuts in (range(25), (0, 3, 4, 20, 24), (0, 24)):
            state = model.new_state(32, EXACT)
            rows = [model.extend(ids[a:b], state, all_logits=True) for a, b in pairwise(cuts)]
            assert_close(torch.cat(rows), expected, LOOSE.get(case, BOUND))
    with load_model(path, ubatch=5) as model:
        assert_close(model.extend(ids, model.new_state(32, EXACT), all_logits=True), expected)


@pytest.mark.parametrize("case", CASES)
def test_sequences_of_unequal_length_together(case):
    path, ids, expected = golden(case)
    with load_model(path) as model:
        pool = model.new_pool(256, 3, EXACT)
        states = [pool.sequence() for _ in range(3)]
        for lengths in ((5, 9, 9), (1, 1, 1), (7, 1, 1), (2, 2, 6)):
            past = [state.n_past for state in states]
            pieces = [(ids[a : a + n], s) for a, n, s in zip(past, lengths, states)]
            ends = [a + n - 1 for a, n in zip(past, lengths)]
            found = model.extend_together(pieces)
            assert_close(found, expected[ends], LOOSE.get(case, BOUND))


def test_merged_gate_and_up_give_the_same(tmp_path):
    _, ids, expected = golden("qwen3_5_moe")
    folder, path = shared("golden/convert/qwen3_5_moe/hf"), tmp_path / "merged.gguf"
    words = ("--outfile", str(path), "--outtype", "f32", "--merge-gate-up")
    assert main(["convert", str(folder), *words]) == 0
    with load_model(path) as model:
        assert model.network.blocks[0].row_layers[0].experts.gate_up is not None
        assert_close(model.forward(ids), expected)


def test_independent_sequences_in_one_batch():
    path, ids, expected = golden("qwen3_5_moe")
    with load_model(path) as model:
        rows = torch.from_numpy(np.stack([ids[:12], ids[12:]]))
        found = [model.logits(h) for h in model.hidden(rows)]
        assert_close(found[0], expected[:12])
        assert_close(found[1], model.forward(ids[12:]))


def test_snapshots_and_no_other_way_back():
    path, ids, expected = golden("qwen3_5")
    with load_model(path) as model:
        state = model.new_state(64, EXACT)
        model.extend(ids[:10], state)
        early = state.snapshot()
        with pytest.raises(UsageError, match="layer 0 has a recurrent state.*token 10 to 9"):
            state.truncate(9)
        model.extend(ids[10:20], state)
        late = state.snapshot()
        state.restore(early)
        assert state.n_past == 10
        model.extend(ids[:7], state)  # something else
        state.restore(late)
        assert_close(model.extend(ids[20:], state, all_logits=True), expected[20:])
        state.restore(early)
        assert_close(model.extend(ids[10:], state, all_logits=True), expected[10:])
        state.truncate(0)
        assert_close(model.extend(ids, state, all_logits=True), expected)
        state.clear()
        assert_close(model.extend(ids[:3], state, all_logits=True), expected[:3])


def test_a_state_that_saw_other_tokens_is_refused():
    """As after a pass that failed between two layers."""
    path, ids, _ = golden("qwen3_5")
    with load_model(path) as model:
        state = model.new_state(64)
        model.extend(ids[:4], state)
        assert isinstance(state.layers[2], RecurrentState)
        state.layers[2].n_seen = 6
        with pytest.raises(UsageError, match="layer 2 has seen 6 tokens.* position 4"):
            model.extend(ids[4:6], state)
        state.clear()
        model.extend(ids[:4], state)
        state.layers[2] = None
        with pytest.raises(TypeError, match="layer 2 keeps no recurrent state"):
            model.extend(ids[4:6], state)


def test_a_state_does_not_grow_with_the_capacity():
    path, _, _ = golden("qwen3_5")
    with load_model(path) as model:
        mixers = [block.mixer for block in model.network.blocks]
        sizes = [[m.state_bytes(n, EXACT) for m in mixers] for n in (256, 1024)]
        assert sizes[0][:3] == sizes[1][:3] and sizes[1][3] == 4 * sizes[0][3]
        state = model.new_state(256, EXACT)
        assert [layer.nbytes for layer in state.layers if layer is not None] == sizes[0]
        assert sizes[0][0] == 4 * (3 * 160 + 6 * 16 * 16)


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """The trained model with experts, in bf16: three delta nets and one attention layer."""
    path = tmp_path_factory.mktemp("mini") / "bf16.gguf"
    folder = shared("models/mini-qwen35moe")
    assert main(["convert", str(folder), "--outfile", str(path), "--outtype", "bf16"]) == 0
    return path


def run(capsys, *words) -> str:
    """Return what a command prints on the CPU."""
    capsys.readouterr()
    command, *arguments = map(str, words)
    assert main([command, "--device", "cpu", *arguments]) == 0
    return capsys.readouterr().out


def test_chunks_of_a_long_prompt_and_steps_after_them(mini):
    """Pieces that begin within a chunk of 64, and sequences of unequal length together."""
    with load_model(mini) as model:
        ids = model.tokenizer.encode(PROSE)[:150]
        assert len(ids) == 150
        expected = model.forward(ids)
        for cuts in ((0, 64, 128, 150), (0, 63, 65, *range(131, 151))):
            state = model.new_state(150, EXACT)
            rows = [model.extend(ids[a:b], state, all_logits=True) for a, b in pairwise(cuts)]
            assert_close(torch.cat(rows), expected)
        pool = model.new_pool(512, 3, EXACT)
        states = [pool.sequence() for _ in range(3)]
        for ends in ((70, 130, 1), (71, 150, 100)):
            pieces = [(ids[s.n_past : end], s) for s, end in zip(states, ends)]
            assert_close(model.extend_together(pieces), expected[[end - 1 for end in ends]])


def test_generate_repeats(mini, capsys):
    found = [
        run(capsys, "generate", "-m", mini, "-p", "The history of", "-n", 8, "--temp", 0)
        for _ in range(2)
    ]
    assert found[0] == found[1] and len(found[0]) > 20


def test_bench_and_sweep_bench_restore_the_context(mini, capsys):
    words = ("-m", mini, "-p", 8, "-n", 2, "-d", 4, "-r", 2, "-o", "jsonl")
    rows = [json.loads(line) for line in run(capsys, "bench", *words).splitlines()]
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(8, 0), (0, 2)]
    assert all(len(row["samples_ns"]) == 2 for row in rows)
    with load_model(mini, ubatch=16) as model:
        assert [row.n_kv for row in sweep(model, 40)] == [0, 16, 32]


def test_importance_matrix_and_what_is_quantized_with_it(mini, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(PROSE)
    text, found = tmp_path / "a.txt", tmp_path / "m.gguf"
    run(capsys, "imatrix", "-m", mini, "-f", text, "-o", found, "-c", 64, "--chunks", 2)
    entries = load_imatrix(found).entries
    net = ["attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_out"]
    attention = ["attn_q", "attn_k", "attn_v", "attn_output"]
    ffn = [f"ffn_{x}_{y}" for x in ("gate", "up", "down") for y in ("exps", "shexp")]
    ffn += ["ffn_gate_inp", "ffn_gate_inp_shexp"]
    assert entries.keys() == {
        f"blk.{layer}.{name}.weight"
        for layer in range(4)
        for name in ffn + (attention if layer == 3 else net)
    }
    with load_model(mini) as model:
        tokens = torch.tensor(model.tokenizer.encode(PROSE))[:128].view(2, 64)
        tokens[:, 0] = model.special_tokens.bos
        x = model.network.embed(tokens.flatten())
        x = model.network.blocks[0].branches[0].norm(x)
        for name in net[:4]:
            entry = entries[f"blk.0.{name}.weight"]
            np.testing.assert_allclose(entry.sums[0], x.square().sum(0), rtol=1e-4)
            assert entry.counts.tolist() == [128]
        output, seen = net[4], []
        with model.observe(lambda name, x, experts: seen.append((name, x.clone()))):
            model.hidden(tokens)
        [gated] = [x for name, x in seen if name == f"blk.0.{output}.weight"]
        entry = entries[f"blk.0.{output}.weight"]
        np.testing.assert_allclose(entry.sums[0], gated.square().sum(0), rtol=1e-4)
    small = tmp_path / "q4_k.gguf"
    told = run(capsys, "quantize", "--imatrix", found, mini, small, "Q4_K_S")
    assert "ssm_out" in told
    with open_gguf(small) as file:
        types = {t.name: t.type.name for t in file.tensors}
    assert {types[f"blk.0.{name}.weight"] for name in net} == {"Q4_K"}
    assert types["blk.0.ssm_conv1d.weight"] == "F32" == types["blk.0.ssm_a"]
    (tmp_path / "b.txt").write_text(" ".join(reversed(PROSE.split())))
    measured = []
    for path in (mini, small):
        words = ("-m", path, "-f", tmp_path / "b.txt", "-c", 64, "--chunks", 2)
        line = run(capsys, "perplexity", *words)
        measured.append(float(re.findall(r"PPL = ([0-9.]+)", line)[0]))
    assert measured[1] == pytest.approx(measured[0], rel=0.1)


@pytest.mark.full
def test_perplexity_is_that_of_transformers(mini, capsys):
    """60 windows of 512 tokens; transformers gives 26.7187 for the same windows."""
    text = shared("text/wiki.test.txt")
    told = run(capsys, "perplexity", "-m", mini, "-f", text, "-c", 512, "--chunks", 60)
    [found] = re.findall(r"PPL = ([0-9.]+)", told)
    assert float(found) == pytest.approx(26.7187, abs=0.01)


def test_queries_keys_values_and_gates_in_one_tensor(tmp_path):
    """Older files of qwen3next have `ssm_in`: q, k, v and z of each key head in turn."""
    path, ids, expected = golden("qwen3_next")
    f32, merged = ggml_type("F32"), {}
    with open_gguf(path) as source:
        rows = {t.name: source.read_rows(t, 0, t.n_rows) for t in source.tensors}
        tensors = []
        for tensor in source.tensors:
            at, _, name = tensor.name.rpartition("attn_qkv")
            if name == ".weight":
                q, k, v, z = np.split(
                    np.concatenate([rows[tensor.name], rows[f"{at}attn_gate.weight"]]),
                    (32, 64, 128),
                )
                heads = [part.reshape(2, len(part) // 2, -1) for part in (q, k, v, z)]
                tensor = TensorInfo(f"{at}ssm_in.weight", (192, 32), f32)
                merged[tensor.name] = np.concatenate(heads, axis=1).reshape(192, -1)
            elif tensor.name.endswith("attn_gate.weight"):
                continue
            tensors.append(tensor)
        with GGUFWriter(tmp_path / "old.gguf", source.metadata, tensors) as writer:
            for tensor in tensors:
                writer.write(tensor, merged.get(tensor.name, rows.get(tensor.name)))
    assert len(merged) == 3
    with load_model(tmp_path / "old.gguf") as model:
        assert_close(model.forward(ids), expected)


@pytest.mark.parametrize(
    "keys, told",
    [
        ({"ssm.group_count": u32(4)}, "6 value heads for 4 key heads"),
        ({"ssm.inner_size": u32(97)}, "inner_size' is 97, expected a multiple of 6 value heads"),
    ],
)
def test_sizes_that_contradict_each_other(keys, told, tmp_path):
    path, _, _ = golden("qwen3_5")
    with open_gguf(path) as source:
        keys = {f"qwen35.{key}": value for key, value in keys.items()}
        write_gguf(tmp_path / "m.gguf", source, metadata=keys)
    with pytest.raises(ConfigError, match=told):
        load_model(tmp_path / "m.gguf")


def test_layers_by_interval_where_no_list_says_which(tmp_path):
    path, ids, expected = golden("qwen3_5")
    keys = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": None}
    with open_gguf(path) as source:
        write_gguf(tmp_path / "m.gguf", source, metadata=keys)
    with load_model(tmp_path / "m.gguf") as model:
        assert_close(model.forward(ids), expected)

"""Second moments: their sums, folds, experts, file, resuming, and the command."""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import ImatrixError, IqforgeError, OutputError, UsageError
from iqforge.imatrix.moments import saving
from iqforge.imatrix.moments.collector import MomentSums
from iqforge.imatrix.moments.data import MomentInput, correlations, pack, unpack
from iqforge.imatrix.moments.lookup import moments_of
from iqforge.imatrix.moments.store import DeviceSums, SumsInMemory, mean_of
from iqforge.runtime.model import load_model

from .imatrices import N_CTX, tiny_llama_file
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe
from .tiny_model import write_gguf

SETTINGS = {"n_ctx": N_CTX, "chunks": 10, "batch_tokens": 2 * N_CTX}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama_file(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_tiny_qwen3moe(folder / "hf", n_experts=4, n_layers=1)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        return write_gguf(folder / "moe.gguf", source)


def observed(path, text: str, n_chunks: int) -> dict[str, list]:
    """Return [(x, experts)] of every tensor for chunks of a text, one chunk at a time."""
    found: dict[str, list] = {}
    with load_model(path) as model:
        tokens = model.tokenizer.encode(text)
        with model.observe(lambda name, x, e: found.setdefault(name, []).append((x.clone(), e))):
            for chunk in range(n_chunks):
                ids = torch.tensor(tokens[chunk * N_CTX : (chunk + 1) * N_CTX])[None].clone()
                if model.special_tokens.add_bos:
                    ids[:, 0] = model.special_tokens.bos
                model.hidden(ids)
    return found


def test_triangles_are_packed_and_unpacked():
    x = np.random.default_rng(0).normal(size=(20, 7))
    h = x.T @ x
    assert np.array_equal(unpack(pack(h), 7), h)
    h[3] = h[:, 3] = 0
    diagonal, packed = correlations(h)
    restored = unpack(packed, 7) * np.sqrt(np.outer(diagonal, diagonal))
    np.testing.assert_allclose(restored, h, atol=1e-12)
    assert unpack(packed, 7)[3, 3] == 1


def test_moments_are_those_of_the_inputs(llama, tmp_path):
    made = iqforge.collect_hessian(llama, PROSE * 20, tmp_path / "h.safetensors", **SETTINGS)
    xs = observed(llama, PROSE * 20, 10)
    assert made.owners["blk.0.attn_q.weight"] == made.owners["blk.0.attn_v.weight"]
    assert made.owners["blk.0.ffn_up.weight"] == made.owners["blk.0.ffn_gate.weight"]
    assert made.owners.keys() == {name for name in xs if name.startswith("blk.")}
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        owner = made.owners[name]
        for fold, chunks in (("fit", slice(0, 8)), ("hold", slice(8, 10))):
            x = torch.cat([rows for rows, _ in xs[name][chunks]]).double().numpy()
            expected = x.T @ x / len(x)
            found = made.matrix(owner, fold, 0)
            assert made.counts(owner, fold).tolist() == [len(x)]
            np.testing.assert_allclose(found, expected, atol=1e-5 * expected.max())
            np.testing.assert_allclose(made.diagonal(owner, fold)[0], np.diagonal(found), rtol=1e-6)


def test_experts_have_statistics_each_or_share_those_of_the_layer(moe, tmp_path):
    each = iqforge.collect_hessian(moe, PROSE * 20, tmp_path / "each.safetensors", **SETTINGS)
    layer = iqforge.collect_hessian(
        moe, PROSE * 20, tmp_path / "layer.safetensors", experts="layer", **SETTINGS
    )
    gate, down = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"
    xs = observed(moe, PROSE * 20, 8)
    owner = each.owners[gate]
    assert each.owners["blk.0.ffn_up_exps.weight"] == owner
    assert (each.inputs[owner].n_matrices, layer.inputs[layer.owners[gate]].n_matrices) == (4, 1)
    assert each.inputs[each.owners[down]].n_matrices == 4
    assert layer.inputs[layer.owners[down]].n_matrices == 4
    total, counts = 0.0, each.counts(owner, "fit")
    for expert in range(4):
        x = torch.cat([rows[e == expert] for rows, e in xs[gate]]).double().numpy()
        assert counts[expert] == len(x) > 0
        found = each.matrix(owner, "fit", expert) * len(x)
        np.testing.assert_allclose(found, x.T @ x, atol=1e-5 * found.max())
        total = total + found
    shared = layer.matrix(layer.owners[gate], "fit", 0) * counts.sum()
    np.testing.assert_allclose(shared, total, atol=1e-5 * shared.max())


class There(SumsInMemory):
    """Sums that say that they are on a GPU."""

    def on_device(self, name, fold, index):
        sums, count = self._total.sums[name, fold][index], int(self.counts(name, fold)[index])
        return DeviceSums(sums, max(count, 1), self.diagonal(name, fold)[index])

    def mean_on_device(self, name, fold):
        return mean_of(self._total.sums[name, fold], self.counts(name, fold))


def test_moments_of_experts_on_a_gpu_are_mixed_as_on_the_cpu():
    """Those of an expert that saw few tokens or none have the bits of the CPU."""
    gate, down, counts = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight", [7, 0, 90, 3]
    total = MomentSums({name: MomentInput(name, (name,), 4, 24) for name in (gate, down)})
    for name in total.inputs:
        for fold in ("fit", "hold"):
            xs = [torch.randn(count, 24) for count in counts]
            total.sums[name, fold] = torch.stack([x.T @ x for x in xs])
            total.counts[name, fold] = torch.tensor(counts)
    store = There(total, "model")
    for name, nothing_seen in ((gate, True), (down, False)):
        moments = moments_of(store, name, (4, 8, 24))
        assert moments is not None
        for index in range(4):
            there, fit = moments.on_device(index, False), moments.fit(index)
            if there is None:
                assert not counts[index] and not nothing_seen
                continue
            own = there.sums.double().numpy() / there.count
            prior = np.diag(np.diagonal(own)) if there.prior is None else there.prior.numpy()
            np.testing.assert_array_equal((1 - there.share) * own + there.share * prior, fit)
            np.testing.assert_array_equal(there.diagonal, np.diagonal(fit))
            held, hold = moments.on_device(index, True), moments.hold(index)
            assert (held is None) == (hold is None) == (not counts[index])
            if held is not None:
                np.testing.assert_array_equal(held.sums.double().numpy() / held.count, hold)


def test_bf16_halves_the_file_and_stays_close(llama, tmp_path):
    full = iqforge.collect_hessian(llama, PROSE * 20, tmp_path / "a.safetensors", **SETTINGS)
    half = iqforge.collect_hessian(
        llama, PROSE * 20, tmp_path / "b.safetensors", correlations="bf16", **SETTINGS
    )
    sizes = [(tmp_path / name).stat().st_size for name in ("a.safetensors", "b.safetensors")]
    assert sizes[1] < 0.55 * sizes[0]
    name = full.owners["blk.0.ffn_down.weight"]
    one, other = full.matrix(name, "fit", 0), half.matrix(name, "fit", 0)
    scale = np.sqrt(np.outer(np.diagonal(one), np.diagonal(one)))
    assert np.abs((one - other) / scale).max() < 2**-8


def test_each_text_has_its_own_held_out_end(llama, tmp_path):
    made = iqforge.collect_hessian(
        llama, [PROSE * 20, PROSE[::-1] * 20], tmp_path / "h.safetensors", **SETTINGS
    )
    owner = made.owners["blk.0.attn_q.weight"]
    assert made.counts(owner, "fit").tolist() == [16 * N_CTX]
    assert made.counts(owner, "hold").tolist() == [4 * N_CTX]
    assert [text["tokens"] for text in made.texts] == [10 * N_CTX] * 2
    assert len({text["sha256"] for text in made.texts}) == 2


class Stop(Exception):
    pass


def test_an_interrupted_run_resumes_to_the_same_bytes(moe, tmp_path, monkeypatch):
    iqforge.collect_hessian(moe, PROSE * 20, tmp_path / "whole.safetensors", **SETTINGS)
    out, save = tmp_path / "h.safetensors", saving.save_moments_snapshot
    seen = []

    def save_and_stop(total, *rest):
        save(total, *rest)
        seen.append(total.done)
        if len(seen) < 3:
            raise Stop

    monkeypatch.setattr(saving, "save_moments_snapshot", save_and_stop)
    settings = SETTINGS | {"output_frequency": 2, "resume": True}
    for _ in range(2):
        with pytest.raises(Stop):
            iqforge.collect_hessian(moe, PROSE * 20, out, **settings)
    with pytest.raises(ImatrixError, match="Different: chunks"):
        iqforge.collect_hessian(moe, PROSE * 20, out, **settings | {"chunks": 9})
    iqforge.collect_hessian(moe, PROSE * 20, out, **settings)
    assert seen == [2, 4, 6, 8]
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "h.safetensors.resume").exists()


def test_rows_that_are_not_finite_are_dropped_and_counted(llama, tmp_path, caplog):
    from iqforge.imatrix.moments.collector import MomentCollector, MomentSums
    from iqforge.imatrix.moments.options import HessianOptions

    with load_model(llama) as model:
        total = MomentSums(
            {"blk.0.x.weight": MomentInput("blk.0.x.weight", ("blk.0.x.weight",), 1, 2)}
        )
        collector = MomentCollector(model, HessianOptions(), total)
        collector("blk.0.x.weight", torch.tensor([[1.0, 2], [float("nan"), 3], [3, 4]]), None)
    assert total.dropped == 1
    assert total.sums["blk.0.x.weight", "fit"].tolist() == [[[10, 14], [14, 20]]]
    assert total.counts["blk.0.x.weight", "fit"].tolist() == [2]


def test_another_file_is_refused(llama, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, path)
    with pytest.raises(ImatrixError, match="is not a file of second moments"):
        iqforge.load_hessian(path)
    made = iqforge.collect_hessian(llama, PROSE * 20, tmp_path / "h.safetensors", **SETTINGS)
    data = bytearray((tmp_path / "h.safetensors").read_bytes())
    (tmp_path / "short.safetensors").write_bytes(data[:-5])
    with pytest.raises(IqforgeError, match="short.safetensors"):
        iqforge.load_hessian(tmp_path / "short.safetensors")
    owner = made.owners["blk.0.attn_q.weight"]
    at = made.tensors[f"{owner}.fit.tri"].begin
    data[at : at + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "nan.safetensors").write_bytes(data)
    with pytest.raises(ImatrixError, match="not finite"):
        iqforge.load_hessian(tmp_path / "nan.safetensors").matrix(owner, "fit", 0)


def test_what_is_read_is_not_written_over(llama, tmp_path):
    moments, text = tmp_path / "h.safetensors", tmp_path / "text.txt"
    text.write_text(PROSE)
    iqforge.collect_hessian(llama, PROSE * 20, moments, **SETTINGS)
    for path, options in ((moments, {"hessian": moments}), (text, {"calibrate": [text]})):
        before = path.read_bytes()
        with pytest.raises(OutputError, match="same file as the input"):
            iqforge.quantize_model("unread.gguf", path, "Q4_0", **options)
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "kind"), [(b"GGUF\x03\x00\x00\x00more", "a GGUF file"), (b"text\n", "no safetensors")]
)
def test_a_file_of_another_kind_is_named(data, kind, tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    assert main(["hessian", "--show", str(path)]) == 1
    said = capsys.readouterr().err
    assert kind in said and "not second moments as `iqforge hessian` writes them" in said


def test_moments_of_another_model_are_named(llama, moe, tmp_path, capsys):
    iqforge.collect_hessian(moe, PROSE * 20, tmp_path / "h.safetensors", **SETTINGS)
    words = ["--hessian", str(tmp_path / "h.safetensors"), str(llama), str(tmp_path / "o.gguf")]
    assert main(["quantize", *words, "Q4_0"]) == 1
    said = capsys.readouterr().err
    assert "the file of second moments seems to belong to another model" in said
    assert "importance matrix" not in said


def test_command_says_sizes_and_shows_figures(llama, tmp_path, capsys):
    text, out = tmp_path / "t.txt", tmp_path / "h.safetensors"
    text.write_text(PROSE * 20)
    words = ["hessian", "-m", str(llama), "-f", str(text), "-c", str(N_CTX), "--chunks", "5"]
    assert main([*words, "-o", str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "MiB of memory, a file of" in said.err and "with one text" in said.err
    assert "inputs of" in said.out
    assert main(["hessian", "--show", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["input", "tensors", "matrices"]
    [row] = [line.split() for line in lines if line.startswith("blk.0.ffn_down")]
    assert row[4:6] == [str(4 * N_CTX), str(N_CTX)]
    assert any(line.startswith("text: t.txt, ") for line in lines)
    header = json.loads(out.read_bytes()[8 : 8 + int.from_bytes(out.read_bytes()[:8], "little")])
    assert json.loads(header["__metadata__"]["texts"])[0]["tokens"] == 5 * N_CTX
    assert main(["hessian", "-m", str(llama)]) != 0
    assert "-f TEXT" in capsys.readouterr().err


def test_frequency_is_checked(llama, tmp_path):
    with pytest.raises(UsageError, match="chunks between two writes"):
        iqforge.collect_hessian(
            llama, PROSE * 20, tmp_path / "h.safetensors", output_frequency=-1, **SETTINGS
        )

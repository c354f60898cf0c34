"""Quantizing with calibration texts, where layers read what the rounded layers before them give."""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import IqforgeError, UsageError
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.tensor_names import TensorName
from iqforge.formats.types import ggml_type
from iqforge.imatrix.moments.options import HessianOptions
from iqforge.imatrix.moments.sequential import RoundedTensor, SequentialMoments
from iqforge.imatrix.texts import Text
from iqforge.quantize.options import Shards
from iqforge.quantize.plan.plan import PlannedTensor
from iqforge.quantize.rounding.followed import followed_tensors
from iqforge.quantize.rounding.kernels.feedback import product
from iqforge.runtime.model import load_model

from .broken_runs import BreakAfter
from .imatrices import N_CTX
from .tiny_checkpoint import PROSE, make_tiny_llama, make_tiny_qwen3moe
from .tiny_model import write_gguf

TEXT = PROSE * 3
FULL = pytest.mark.full
OPTIONS = {"calibrate_chunks": 10, "calibrate_ctx": N_CTX, "pure": True, "device": "cpu"}
OPTIONS |= {"calibrate": TEXT, "sequential": True, "hessian_shrink": 0.3, "refine": False}
OPTIONS |= {"token_embedding_type": "F32"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_llama(folder / "hf", n_layers=2)
    with CheckpointSource(open_checkpoint(folder / "hf")) as source:
        return write_gguf(folder / "model.gguf", source)


def inputs_of(model, chunks: torch.Tensor) -> dict[str, np.ndarray]:
    """Return what the products of a model read, float64[rows, n], by tensor."""
    seen: dict[str, list[np.ndarray]] = {}

    def see(name, x, experts):
        assert experts is None
        seen.setdefault(name, []).append(x.numpy().astype(np.float64))

    with model.observe(see):
        for chunk in chunks:
            model.hidden(chunk[None])
    return {name: np.concatenate(rows) for name, rows in seen.items()}


def test_moments_and_targets_are_those_of_rounded_layers(llama, tmp_path):
    """Rounded to coarse values, a first layer changes what the second one reads; a hand-made least
    squares says what its rows become, and no share of the way is better on held-out text.
    """
    options = HessianOptions(n_ctx=N_CTX, chunks=10)
    type = ggml_type("Q4_0")
    with load_model(llama) as model:
        rounded = {}
        for tensor in model.source.tensors:
            if tensor.name.startswith("blk.0.") and len(tensor.shape) > 1:
                rows = model.source.read_rows(tensor, 0, tensor.n_rows)
                x = iqforge.decode(tensor.type, rows, tensor.n_cols)
                rounded[tensor.name] = iqforge.encode(type, x)
        layers = SequentialMoments(model, [Text(TEXT, "a")], options, str(tmp_path), product)
        layers.rounded = lambda layer: [
            RoundedTensor(name, type, blocks) for name, blocks in rounded.items() if layer == 0
        ]
        layers.wanted.add(1)
        layers.needed[1] += 1
        made = layers.layer(1)
        found = layers.targets(1, "blk.1.attn_q.weight")
        chunks = layers._cut.inputs(0, len(layers._cut))
        clean = inputs_of(model, chunks)["blk.1.attn_q.weight"]
        for name, blocks in rounded.items():
            model.weights.store.replace(name, type, blocks)
        rough = inputs_of(model, chunks)["blk.1.attn_q.weight"]
        n = layers._folds.count("fit") * N_CTX
        fit = rough[:n].T @ rough[:n] / n
        np.testing.assert_allclose(made.matrix("blk.1.attn_k.weight", "fit", 0), fit, atol=1e-4)
        assert np.abs(fit - clean[:n].T @ clean[:n] / n).max() > 1e-2
        damped = fit + 0.01 * np.diagonal(fit).mean() * np.eye(len(fit))
        way = ((clean - rough)[:n].T @ rough[:n] / n) @ np.linalg.inv(damped)
        x = np.random.default_rng().standard_normal((8, len(fit))).astype(np.float32)
        np.testing.assert_allclose(found.moved(x, 0.5), x + 0.5 * x @ way, atol=1e-3)

        def error(share: float) -> float:
            rest = (clean - rough)[n:] - share * rough[n:] @ way.T
            return float(((rest @ x.T) ** 2).sum())

        best = found.share(x)
        assert 0 < best <= 1 and error(best) < error(0)
        assert error(best) <= min(error(share) for share in np.linspace(0, 1, 21)) * 1.001
        layers.done(1)
        assert layers.targets(1, "blk.1.attn_q.weight") is None
        layers.close()


def decoded(path, name: str) -> np.ndarray:
    with open_gguf(path) as source:
        info = source.tensor(name)
        return iqforge.decode(info.type, source.read_rows(info, 0, info.n_rows), info.n_cols)


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "q.gguf"
    iqforge.quantize_model(llama, out, "Q4_0", threads=3, **OPTIONS)
    return out


def test_errors_of_a_first_layer_change_the_second_one(llama, made, tmp_path):
    """Embeddings are in F32, so that the first layer reads what it reads without the option."""
    plain, again = tmp_path / "plain.gguf", tmp_path / "again.gguf"
    iqforge.quantize_model(llama, plain, "Q4_0", **(OPTIONS | {"sequential": False}))
    iqforge.quantize_model(llama, again, "Q4_0", threads=1, **OPTIONS)
    assert again.read_bytes() == made.read_bytes()
    for name, differs in (("blk.0.ffn_up.weight", False), ("blk.1.ffn_up.weight", True)):
        assert (decoded(made, name) != decoded(plain, name)).any() == differs, name
    with open_gguf(made) as source, open_gguf(plain) as other:
        settings = [one.metadata["quantize.hessian.rounding"].data for one in (source, other)]
    assert json.loads(settings[0])["sequential"] is True and "sequential" not in settings[1]


@pytest.mark.parametrize("after", [9, pytest.param(3, marks=FULL), pytest.param(14, marks=FULL)])
@pytest.mark.parametrize("max_size", [None, pytest.param("100K", marks=FULL)])
def test_an_interrupted_run_resumes_to_the_same_bytes(llama, made, tmp_path, after, max_size):
    """Rounded tensors of finished layers come from the unfinished file, or its shards."""
    keywords = {"shards": Shards(max_size=max_size)} | OPTIONS
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(
            llama, tmp_path / "q.gguf", "Q4_0", progress=BreakAfter(after), **keywords
        )
    resumed = BreakAfter(-1)
    iqforge.quantize_model(llama, tmp_path / "q.gguf", "Q4_0", progress=resumed, **keywords)
    assert resumed.resumed
    (first, *others) = sorted(tmp_path.iterdir())
    assert bool(others) == (max_size is not None)
    with open_gguf(first) as source, open_gguf(made) as whole:
        for tensor in whole.tensors:
            mine = source.tensor(tensor.name)
            rows = [
                one.read_rows(info, 0, info.n_rows)
                for one, info in ((source, mine), (whole, tensor))
            ]
            assert np.array_equal(*rows), tensor.name


def planned(name: str, shape: tuple[int, ...] = (32, 32), type: str = "Q4_0") -> PlannedTensor:
    source = TensorInfo(name, shape, ggml_type("F32"))
    return PlannedTensor(source, source.with_type(ggml_type(type)))


def test_tensors_after_those_of_a_later_layer_are_not_followed():
    """As at the borders of a checkpoint's shards."""
    names = [
        "token_embd",
        "per_layer_model_proj",
        "blk.0.attn_q",
        "blk.2.attn_q",
        "blk.1.attn_q",
        "blk.2.attn_k",
    ]
    names += ["blk.3.attn_q", "per_layer_token_embd", "output"]
    plans = [planned(f"{name}.weight") for name in names]
    plans.insert(2, planned("blk.0.attn_norm.weight", (32,), "F32"))
    shapes = {plan.source.name: plan.source.shape for plan in plans}
    sources = (lambda plan: plan.source.name, lambda plan: TensorName.parse(plan.source.name).layer)
    found = followed_tensors(plans, *sources, shapes)
    made = {layer: [name for name, _ in each] for layer, each in found.tensors.items()}
    assert made == {
        None: ["token_embd.weight", "per_layer_model_proj.weight"],
        0: ["blk.0.attn_q.weight"],
        2: ["blk.2.attn_q.weight", "blk.2.attn_k.weight"],
        3: ["blk.3.attn_q.weight"],
    }
    assert found.late == ["blk.1.attn_q.weight", "per_layer_token_embd.weight"]
    assert found.waits == {
        "blk.0.attn_norm.weight",
        "blk.2.attn_q.weight",
        "blk.3.attn_q.weight",
    }
    with pytest.raises(UsageError, match="in the form that the model has"):
        followed_tensors(plans, *sources, shapes | {"blk.1.attn_q.weight": (64, 32)})


def test_what_it_needs(llama, tmp_path):
    out = tmp_path / "q.gguf"
    with pytest.raises(UsageError, match="needs texts"):
        iqforge.quantize_model(llama, out, "Q4_0", sequential=True)
    with pytest.raises(UsageError, match="one whole output"):
        iqforge.quantize_models(llama, [(out, "Q4_0"), (tmp_path / "b.gguf", "Q5_0")], **OPTIONS)
    with pytest.raises(UsageError, match="one whole output"):
        iqforge.quantize_model(llama, out, "Q4_0", shards=Shards(partial=True), **OPTIONS)
    with GGUFWriter(out, {}, []) as writer, pytest.raises(IqforgeError, match="not written yet"):
        writer.stored("token_embd.weight")


@FULL
def test_command_and_experts(tmp_path, capsys):
    """Gate and up of experts are moved by what the router reads; down is not."""
    folder, text, out = tmp_path / "moe", tmp_path / "text.txt", tmp_path / "q.gguf"
    make_tiny_qwen3moe(folder, n_experts=4, n_layers=2)
    text.write_text(TEXT)
    flags = ["--calibrate", str(text), "--calibrate-chunks", "10", "--calibrate-ctx", str(N_CTX)]
    flags += ["--sequential", "--pure", "--device", "cpu", "--validate"]
    assert main(["quantize", *flags, str(folder), str(out), "Q4_0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    moved = {line.split()[0] for line in lines if "to make up for earlier layers" in line}
    assert {"ffn_gate_exps", "ffn_up_exps", "attn_q"} <= moved and "ffn_down_exps" not in moved

"""Rows that are rounded together, so that errors stay out of what routers read."""

from __future__ import annotations

import json

import iqforge
import numpy as np
import pytest
from iqforge.errors import ResumeError, UsageError
from iqforge.formats.codecs.codec import decode_plain
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.rounding.factor import factored
from iqforge.quantize.rounding.methods import rounder_of
from iqforge.quantize.rounding.row_metric import CoupledRounder, row_metric
from iqforge.quantize.rounding.rows import READERS, ROUTERS, RowMetrics

from .broken_runs import fails_after
from .imatrices import N_CTX
from .second_moments import correlated
from .tiny_checkpoint import PROSE, make_tiny_qwen3moe

WIDTH, EXPERTS, LAYERS, N = 96, 4, 3, 256
F32 = ggml_type("F32")


class Model:
    """A source with routers, norms, and matrices that add to the stream."""

    def __init__(self, *without: str, layers: int = LAYERS, **others: tuple[int, ...]):
        generator = np.random.default_rng()
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(layers):
            shapes |= {
                f"blk.{layer}.attn_output.weight": (WIDTH, N),
                f"blk.{layer}.ffn_norm.weight": (WIDTH,),
                f"blk.{layer}.ffn_gate_inp.weight": (EXPERTS, WIDTH),
                f"blk.{layer}.ffn_up_exps.weight": (2, N, WIDTH),
                f"blk.{layer}.ffn_down_exps.weight": (2, WIDTH, N),
            }
        shapes |= {name.replace("__", "."): shape for name, shape in others.items()}
        shapes = {name: shape for name, shape in shapes.items() if name not in without}
        self.tensors = tuple(TensorInfo(name, shape, F32) for name, shape in shapes.items())
        self.values = {
            one.name: generator.normal(1 if "norm" in one.name else 0, 0.3, one.shape)
            for one in self.tensors
        }

    def read_rows(self, info, start, stop):
        rows = self.values[info.name].reshape(-1, info.n_cols)[start:stop]
        return rows.astype("<f4").view(np.uint8)

    def info(self, name: str) -> TensorInfo:
        return next(one for one in self.tensors if one.name == f"blk.{name}.weight")


def squares(model: Model, layers, name: str) -> list[np.ndarray]:
    """Return (W N)^T (W N) of the matrices `name` of layers, those of routers centered."""
    made = []
    for layer in layers:
        read = model.values[f"blk.{layer}.{name}.weight"].reshape(-1, WIDTH)
        read = read * model.values[f"blk.{layer}.ffn_norm.weight"]
        read = read - read.mean(axis=0) if name == "ffn_gate_inp" else read
        made.append(read.T @ read)
    return made


def test_which_rows_are_rounded_together(monkeypatch):
    model = Model()
    rows = RowMetrics(model)
    coupled = {one.name for one in model.tensors if rows.couples(one)}
    # Nothing but the output reads what the last layer's experts add.
    wanted = {f"blk.{layer}.attn_output.weight" for layer in range(LAYERS)}
    wanted |= {f"blk.{layer}.ffn_down_exps.weight" for layer in range(LAYERS - 1)}
    assert coupled == wanted
    assert all((rows.of(one) is not None) == rows.couples(one) for one in model.tensors)
    # A norm after the matrix scales its errors.
    normed = Model(blk__0__post_ffw_norm__weight=(WIDTH,))
    assert not RowMetrics(normed).couples(normed.info("0.ffn_down_exps"))
    assert RowMetrics(normed).couples(normed.info("1.ffn_down_exps"))
    # A layer that predicts further tokens reads a stream of its own.
    further = Model(blk__2__nextn__eh_proj__weight=(WIDTH, 2 * WIDTH))
    first = RowMetrics(further)
    assert not first.couples(further.info("2.attn_output"))
    assert not first.couples(further.info("1.ffn_down_exps"))
    assert first.couples(further.info("1.attn_output"))
    # Large models: routers alone, of the right width.
    routers = [f"blk.{layer}.ffn_gate_inp.weight" for layer in range(LAYERS)]
    dense = Model(*routers)
    assert {one.name for one in dense.tensors if RowMetrics(dense).couples(one)} == wanted
    monkeypatch.setattr("iqforge.quantize.rounding.rows._MOST_PRODUCTS", 0)
    assert not any(RowMetrics(dense).couples(one) for one in dense.tensors)
    assert {one.name for one in model.tensors if RowMetrics(model).couples(one)} == wanted
    narrow = Model(routers[2], blk__2__ffn_gate_inp__weight=(EXPERTS, 32))
    assert not RowMetrics(narrow).couples(narrow.info("1.ffn_down_exps"))


def test_feed_forward_next_to_attention_reads_the_same_norm():
    norms = {f"blk__{layer}__attn_norm__weight": (WIDTH,) for layer in range(LAYERS)}
    gone = (
        f"blk.{i}.{name}.weight" for i in range(LAYERS) for name in ("ffn_norm", "ffn_gate_inp")
    )
    model = Model(*gone, **norms)
    rows = RowMetrics(model)
    for one in model.tensors:  # not by what is in the same layer
        adds = one.name.split(".")[2] in ("attn_output", "ffn_down_exps")
        assert rows.couples(one) == (adds and not one.name.startswith(f"blk.{LAYERS - 1}."))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_metric_is_that_of_later_readers(monkeypatch, threads):
    """Targets make up for the errors of earlier blocks, by the upper factor of G."""
    monkeypatch.setattr("iqforge.quantize.rounding.rows._THREADED", 1 << 40 if threads == 1 else 0)
    monkeypatch.setattr("os.cpu_count", lambda: threads)
    model = Model()
    for name, layers in (("0.attn_output", (0, 1, 2)), ("0.ffn_down_exps", (1, 2))):
        metric = RowMetrics(model).of(model.info(name))
        assert metric is not None and metric.ends[-1] == WIDTH and len(metric.ends) > 3
        routers = sum(squares(model, layers, "ffn_gate_inp"))
        readers = sum(one / np.trace(one) for one in squares(model, layers, "ffn_up_exps"))
        g = np.eye(WIDTH)
        for share, summed in ((ROUTERS, routers), (READERS, readers)):
            g += share * WIDTH * summed / np.trace(summed)
        start = 0
        for end in metric.ends:
            later = slice(start, end)
            # The best error of these rows is -G_KK^-1 G_KJ E_J once later rows are free, too.
            free = np.linalg.inv(g[start:, start:]) @ g[start:, :start]
            np.testing.assert_allclose(
                metric.feedback[:start, later].T, free[: end - start], atol=1e-5
            )
            assert not metric.feedback[start:, later].any()
            start = end


def test_metrics_do_not_depend_on_those_before_and_few_are_held():
    """A run that is resumed begins at any tensor. Sums of routers are kept for some layers only."""
    layers = 19
    model = Model(layers=layers)
    infos = [
        one for one in model.tensors if one.name.endswith(("attn_output.weight", "exps.weight"))
    ]
    rows = RowMetrics(model)
    infos = [one for one in infos if rows.couples(one)]
    assert len(infos) == 2 * layers - 1
    alone = {one.name: RowMetrics(model).of(one) for one in infos}
    for one in (*infos, *infos[::-3]):
        made, wanted = rows.of(one), alone[one.name]
        assert made is not None and wanted is not None
        np.testing.assert_array_equal(made.feedback, wanted.feedback, one.name)
    assert len(rows._made) <= 4 and len(rows._routers) == layers // 8


def test_rows_are_rounded_on_their_own_where_nothing_can_be_factored(caplog):
    metric = row_metric(np.diag([1.0, -1.0] * 16), "blk.0.attn_output.weight")
    assert not metric.feedback.any() and metric.ends == (16, 32)
    assert "blk.0.attn_output.weight: " in caplog.text and "on their own" in caplog.text


def test_weights_that_are_not_finite_are_left_out_of_metrics():
    """The run names them; here they must not spread to all tensors before."""
    model = Model()
    model.values["blk.2.ffn_up_exps.weight"][0, 0, 0] = np.nan
    metric = RowMetrics(model).of(model.info("1.ffn_down_exps"))
    assert metric is not None and metric.feedback.any()
    assert np.isfinite(metric.feedback).all()


def test_a_coupled_rounder_takes_whole_matrices():
    model, type = Model(), ggml_type("Q4_0")
    metric = RowMetrics(model).of(model.info("0.attn_output"))
    assert metric is not None
    together = CoupledRounder(
        type, N, rounder_of(type, N, factored(correlated(N), 0.25), 1), metric
    )
    x = np.zeros((WIDTH - 1, N), dtype=np.float32)
    with pytest.raises(ValueError, match="95 rows, expected all 96"):
        together(x, np.empty((WIDTH - 1, type.row_bytes(N)), dtype=np.uint8))


def test_what_routers_read_is_kept():
    model, type, h = Model(), ggml_type("Q4_0"), correlated(N)
    info = model.info("0.ffn_down_exps")
    metric = RowMetrics(model).of(info)
    assert metric is not None
    x = model.values[info.name][0].astype(np.float32)
    alone = rounder_of(type, N, factored(h, 0.25), 1)
    together = CoupledRounder(type, N, alone, metric)
    s, errors = sum(squares(model, (1, 2), "ffn_gate_inp")), {}
    for run in (alone, together):
        out = np.empty((WIDTH, type.row_bytes(N)), dtype=np.uint8)
        run(x, out)
        rest = x - decode_plain(type, out, N).astype(np.float64)
        errors[run] = [float(((g @ rest @ h) * rest).sum()) for g in (s, np.eye(WIDTH))]
    assert errors[together][0] < 0.6 * errors[alone][0]
    assert errors[together][1] < 1.3 * errors[alone][1]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make_tiny_qwen3moe(folder / "hf", n_experts=4, n_layers=2)
    path = folder / "moe.gguf"
    iqforge.convert_model(folder / "hf", path, outtype="f32")
    return path, iqforge.collect_hessian(path, PROSE * 4, folder / "h.safetensors", n_ctx=N_CTX)


@pytest.mark.full
def test_runs_round_rows_together(moe, tmp_path, monkeypatch):
    path, made = moe
    keywords = {
        "hessian": made,
        "hessian_shrink": 0.3,
        "refine": False,
        "pure": True,
        "device": "cpu",
    }

    def bytes_of(out):
        with open_gguf(out) as file:
            key = json.loads(str(file.metadata["quantize.hessian.rounding"].data))
            return {t.name: file.read_rows(t, 0, t.n_rows).tobytes() for t in file.tensors}, key

    for out, more in (
        ("a", {"threads": 1}),
        ("b", {"threads": 3}),
        ("c", {"threads": 2, "couple_rows": False}),
    ):
        iqforge.quantize_model(path, tmp_path / out, "Q4_0", **keywords, **more)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (together, key), (alone, other) = bytes_of(tmp_path / "a"), bytes_of(tmp_path / "c")
    differ = {name for name in together if together[name] != alone[name]}
    assert differ == {
        "blk.0.attn_output.weight",
        "blk.1.attn_output.weight",
        "blk.0.ffn_down_exps.weight",
    }
    assert {one[0] for one in key if one[-1] == "rows"} == {"attn_output", "ffn_down_exps"}
    assert not any(one[-1] == "rows" for one in other)
    late = {**keywords, "hessian": None, "calibrate": PROSE * 4, "calibrate_ctx": N_CTX}
    made_late = []
    for couple in (True, False):
        iqforge.quantize_model(path, tmp_path / "e", "Q4_0", **late, couple_rows=couple)
        made_late.append(bytes_of(tmp_path / "e")[0])
    assert {name for name, one in made_late[0].items() if one != made_late[1][name]} == differ
    with pytest.raises(UsageError, match="no-couple-rows"):
        iqforge.quantize_model(path, tmp_path / "d", "Q4_0", couple_rows=False)

    out = tmp_path / "q.gguf"
    with fails_after(monkeypatch, 9):
        iqforge.quantize_model(path, out, "Q4_0", **keywords, threads=1)
    with pytest.raises(ResumeError, match="second moments"):
        iqforge.quantize_model(path, out, "Q4_0", **keywords, couple_rows=False)
    iqforge.quantize_model(path, out, "Q4_0", **keywords, threads=1)
    assert out.read_bytes() == (tmp_path / "a").read_bytes()

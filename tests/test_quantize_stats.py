"""quantize-stats: figures against their definitions, samples, and formats of the output."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import NonFiniteError, UnknownTypeError, UnsupportedTypeError, UsageError
from iqforge.formats.codecs.codec import encode_float
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string
from iqforge.imatrix.data import Entry, Imatrix
from iqforge.quantize.report import row_errors
from iqforge.quantize.report.row_errors import row_spans
from iqforge.quantize.report.stats import choose_types
from iqforge.quantize.report.stats_report import html_report

UP, EXPERTS, ODD = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight", "blk.1.ffn_<up>.weight"


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    return {
        "blk.0.attn_norm.weight": values((256,), 0),
        UP: values((72, 512), 1),
        EXPERTS: values((3, 40, 256), 2),
        ODD: values((6, 96), 3),
    }


@pytest.fixture(scope="module")
def model(data, tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("stats") / "model.gguf", data)


def write(path: Path, data: dict[str, np.ndarray]) -> Path:
    infos = [TensorInfo(name, x.shape, ggml_type("F32")) for name, x in data.items()]
    with GGUFWriter(path, {"general.architecture": string("llama")}, infos) as sink:
        for info, x in zip(infos, data.values()):
            sink.write(info, encode_float("F32", x.reshape(-1, x.shape[-1])))
    return path


def importances() -> Imatrix:
    rng = np.random.default_rng(9)
    return Imatrix(
        {
            name: Entry(rng.lognormal(size=shape), np.ones(shape[0], np.int64))
            for name, shape in ((UP, (1, 512)), (EXPERTS, (3, 256)))
        }
    )


@pytest.mark.parametrize("kind", ["IQ4_K", "Q8_0", "IQ4_KS", "Q8_K_R8", "IQ6_K"])
def test_figures_are_their_definitions(model, data, kind):
    report = iqforge.quantize_stats(model, [kind], importances(), include=["ffn"], force=True)
    assert [t.tensor.name for t in report.tensors] == [UP, EXPERTS, ODD]
    imatrix, squares = importances(), 0.0
    for found in report.tensors[:2]:
        x = data[found.tensor.name]
        w = imatrix.importance(found.tensor.name, x.shape)
        rows = np.concatenate(
            [
                iqforge.decode(kind, iqforge.encode(kind, m, own), x.shape[-1], as_weights=True)
                for m, own in zip(x.reshape(-1, *x.shape[-2:]), w)
            ]
        ).reshape(x.shape)
        e, w = (x - rows).astype(np.float64), w.reshape(*x.shape[:-2], 1, x.shape[-1])
        sums = found.errors[kind]
        assert sums.rmse == pytest.approx(np.sqrt((e * e).mean()), rel=1e-6)
        x = x.astype(np.float64)
        assert sums.relative_rmse == pytest.approx(np.sqrt((e * e).sum() / (x * x).sum()), rel=1e-6)
        assert sums.weighted_rmse == pytest.approx(
            np.sqrt((w * e * e).sum() / (w * x * x).sum()), rel=1e-6
        )
        assert sums.largest_error == pytest.approx(np.abs(e).max(), rel=1e-6)
        assert sums.bits_per_weight == 8 * ggml_type(kind).tensor_bytes(x.shape) / x.size
        squares += sums.e2
    assert report.total(ggml_type(kind)).e2 == pytest.approx(
        squares + sum(s.e2 for s in report.tensors[2].errors.values())
    )
    assert (
        report.tensors[2].errors.keys() == ({kind} if kind == "Q8_0" else set())
        and not report.tensors[2].weighted
    )


def test_threads_and_pieces(model, monkeypatch):
    whole = iqforge.quantize_stats(model, ["IQ4_K"], importances(), force=True).as_dict()
    monkeypatch.setattr(row_errors, "PIECE_ELEMENTS", 8192)
    digests = {
        json.dumps(
            iqforge.quantize_stats(
                model, ["IQ4_K", "Q8_K_R16"], importances(), threads=n, force=True
            ).as_dict()
        )
        for n in (1, 2, 3)
    }
    assert len(digests) == 1
    pieces = json.loads(digests.pop())
    assert pieces["tensors"][0]["errors"][0] == pytest.approx(whole["tensors"][0]["errors"][0])


def test_interleaved_types_are_their_plain_ones(model):
    report = iqforge.quantize_stats(model, ["IQ4_K", "IQ4_K_R4"], include=[r"ffn_up\.w"])
    plain, packed = report.tensors[0].errors.values()
    assert (plain.e2, plain.largest_error) == (packed.e2, packed.largest_error)


def test_rows_of_a_sample():
    tensor = TensorInfo("t", (3, 40, 256), ggml_type("F32"))
    everything = [row for start, stop in row_spans(tensor, 0) for row in range(start, stop)]
    assert everything == list(range(120)) and len(list(row_spans(tensor, 0))) == 3
    for sampled in (1, 16, 50, 100, 119):
        spans = list(row_spans(tensor, sampled))
        assert len(spans) == -(-sampled // 16) and len(set(spans)) == len(spans)
        assert all(
            start // 40 == (stop - 1) // 40 and start % 40 % 16 == 0 and stop - start in (8, 16)
            for start, stop in spans
        )
    assert list(row_spans(tensor, 120)) == list(row_spans(tensor, 0))
    assert list(row_spans(TensorInfo("t", (64, 256), ggml_type("F32")), 32)) == [(16, 32), (48, 64)]


def test_types_by_default():
    names = [t.name for t in choose_types([], ["F32", "Q8_0", "IQ4_K", "IQ4_K_R4", "Q8_K_R8"])]
    assert names == ["IQ4_K", "Q8_K_R8", "Q8_0"]


def test_command(model, tmp_path, capsys):
    page = tmp_path / "map.html"
    assert (
        main(
            [
                "quantize-stats",
                str(model),
                "--type",
                "iq4_k",
                "Q8_0",
                "--rows",
                "32",
                "--html",
                str(page),
                "-t",
                "1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "ffn_up.weight  [512, 72] f32, 32 of 72 rows" in out
        and "all 3 tensors" in out
        and "(2 of 3 tensors)" in out
    )
    assert "a sample: 62 of 198 rows" in out and "heat map written" in out
    html = page.read_text()
    assert (
        "ffn_&lt;up&gt;" in html
        and "<up>" not in html
        and "IQ4_K" in html
        and 'class="none"' in html
    )
    assert (
        "http" not in html
        and "src=" not in html
        and html.count("<script>") == 1
        and "prefers-color-scheme: dark" in html
    )
    assert (
        main(["quantize-stats", str(model), "--type", "q8_0", "--json", "--include", "exps"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in report["tensors"]] == [EXPERTS] and 0.003 < report["total"][0][
        "relative_rmse"
    ] < 0.02
    assert (
        report["total"][0]["weighted_rmse"] is None and report["total"][0]["bits_per_weight"] == 8.5
    )


def test_the_page_compares_tensors_with_the_mean_of_their_type(model):
    report = iqforge.quantize_stats(
        model, ["IQ4_K", "Q8_0"], importances(), include=["ffn"], force=True
    )
    html = html_report(report)
    share = [t.tensor.n_bytes for t in report.tensors]
    for tensor in report.tensors:
        for name, sums in tensor.errors.items():
            mean = report.total(sums.type).weighted_rmse
            (said,) = (
                line
                for line in re.findall(r'title="([^"]*)"', html.partition('class="all"')[2])
                if line.startswith(f"{escape(tensor.tensor.name)} as {name}:")
            )
            for figure in (
                f"{sums.weighted_rmse / mean:.3g} × the mean of {name}",
                f"rmse {sums.rmse:.3e}",
                f"largest error {sums.largest_error:.3e}",
                f"{sums.bits_per_weight:.4f} bits per weight",
                f"{100 * tensor.tensor.n_bytes / sum(share):.2f} % of the file",
            ):
                assert figure in said, (figure, said)
    assert html.count('class="panel"') == 2 and html.count("<ol class=") == 2
    rows = html.partition('class="all"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    assert rows.count("<tr>") == len(report.tensors)
    assert rows.count("data-sort=") == len(report.tensors) * 4, "each column can be sorted"
    assert {"over", "under"} <= set(re.findall(r'<td class="(\w+)', rows))


def test_many_types_are_chosen_from_a_list(model):
    types = ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]
    html = html_report(iqforge.quantize_stats(model, types, rows=16))
    assert html.count("<option") == 4 and html.count('class="panel"') == 4


def test_what_goes_wrong(model, data, tmp_path, capsys):
    with pytest.raises(UnknownTypeError, match="IQ4_K"):
        iqforge.quantize_stats(model, ["IQ4_KK"])
    with pytest.raises(UnsupportedTypeError, match="I2_S"):
        iqforge.quantize_stats(model, ["I2_S"])
    with pytest.raises(UsageError, match="no tensor to measure has a name with xyz in it"):
        iqforge.quantize_stats(model, ["Q8_0"], include=["xyz"])
    with pytest.raises(UsageError, match="not a regular expression"):
        iqforge.quantize_stats(model, ["Q8_0"], include=["("])
    bad = {EXPERTS: data[EXPERTS].copy()}
    bad[EXPERTS][1, 7, 9] = np.nan
    with pytest.raises(NonFiniteError, match="row 7, column 9"):
        iqforge.quantize_stats(write(tmp_path / "bad.gguf", bad), ["Q8_0"])
    before = model.read_bytes()
    assert main(["quantize-stats", str(model), "--html", str(model)]) == 1
    assert "same file" in capsys.readouterr().err and model.read_bytes() == before

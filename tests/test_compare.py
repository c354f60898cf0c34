"""`iqforge compare`: figures, resuming, and a page that a browser shows without cutting anything
off.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import partial

import iqforge
import pytest
from iqforge.cli import main
from iqforge.convert.checkpoint.folder import open_checkpoint
from iqforge.convert.source import CheckpointSource
from iqforge.errors import EvaluationError, UsageError
from iqforge.formats.values import ValueType, array
from iqforge.proof import style
from iqforge.proof.compare_page import html_page
from iqforge.runtime.evaluate.comparison import figures_from_json, short_labels

from .shared import shared
from .tiny_checkpoint import PROSE, make_tiny_llama
from .tiny_model import write_gguf

BASE = "golden/tools/gguf/tiny-llama-untied-f16.gguf"
SMALL = "golden/tools/gguf/tiny-llama-untied.Q4_K_M.imatrix.gguf"
LARGE = "golden/tools/gguf/tiny-llama-untied.Q8_0.gguf"
TEXT = "golden/tools/eval/text.txt"
FAST = {"n_ctx": 128, "chunks": 3, "speed_prompt": 16, "speed_generation": 4, "device": "cpu"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    other = folder / "other.txt"
    other.write_text(shared(TEXT).read_text()[3000:])
    comparison = iqforge.compare_models(
        shared(BASE), [shared(SMALL), shared(LARGE)], [shared(TEXT), other], folder / "w", **FAST
    )
    return comparison, folder


def test_figures_are_those_of_perplexity(compared):
    comparison, folder = compared
    live = iqforge.measure_perplexity(
        shared(SMALL), shared(TEXT), against=shared(BASE), n_ctx=128, chunks=3
    )
    small, large = comparison.models
    text = small.texts[0]
    assert text.perplexity == pytest.approx(live.statistics.ppl)
    assert text.kld == pytest.approx(live.statistics.mean_kld, rel=1e-3)
    assert text.quantile(0.99) == pytest.approx(live.statistics.kld_quantiles(0.99)[0], rel=1e-2)
    assert text.same_top == live.statistics.same_top
    assert comparison.base.texts[0].perplexity == pytest.approx(live.statistics.ppl_base, rel=1e-4)
    assert comparison.base.texts[0].kld is None
    assert small.file_bytes == shared(SMALL).stat().st_size < large.file_bytes
    assert 4 < small.bits_per_weight < large.bits_per_weight < 16
    assert small.memory > 0 and small.prompt > 0 and small.generation > 0
    assert not list((folder / "w").glob("*.kld*"))


def test_the_tokens_that_differ_most_are_found(compared):
    comparison, _ = compared
    text = comparison.models[0].texts[0]
    values = [one.divergence for one in text.differences]
    assert len(values) == 10 and values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(text.quantile(1.0))
    assert all(one.context and len(one.base) == len(one.model) == 3 for one in text.differences)
    for one in text.differences:
        assert one.base[0].probability >= one.base[1].probability > 0
        assert shared(TEXT).read_text().find(one.context[-20:].strip()) >= 0


def test_figures_survive_a_file(compared):
    model = compared[0].models[0]
    stored = json.loads(json.dumps(compared[0].to_json()))["models"][0]
    assert figures_from_json(stored) == model


def test_an_interrupted_run_resumes(tmp_path):
    work, done = tmp_path / "work", []

    class Stopped(Exception):
        pass

    def stop(figures, resumed):
        done.append((figures.name, resumed))
        if len(done) == 2:
            raise Stopped

    models = [shared(SMALL), shared(LARGE)]
    with pytest.raises(Stopped):
        iqforge.compare_models(shared(BASE), models, [shared(TEXT)], work, on_model=stop, **FAST)
    assert len(list(work.glob("*.kld"))) == 1 and not list(work.glob("*.part"))
    first = {path: path.read_bytes() for path in work.iterdir()}
    again = []
    comparison = iqforge.compare_models(
        shared(BASE),
        models,
        [shared(TEXT)],
        work,
        on_model=lambda figures, resumed: again.append(resumed),
        **FAST,
    )
    assert again == [True, True, False]
    kept = [path for path in first if path.suffix == ".json"]
    assert len(kept) == 2 and all(path.read_bytes() == first[path] for path in kept)
    # Another option is another measurement.
    again.clear()
    iqforge.compare_models(
        shared(BASE),
        models[:1],
        [shared(TEXT)],
        work,
        on_model=lambda figures, resumed: again.append(resumed),
        **FAST | {"chunks": 2},
    )
    assert again == [False, False] and comparison.models[1].name.endswith("Q8_0")


def test_compact_predictions_give_nearly_the_same(compared, tmp_path):
    found = iqforge.compare_models(
        shared(BASE), [shared(SMALL)], [shared(TEXT)], tmp_path, compact=True, keep=True, **FAST
    )
    text, other = found.models[0].texts[0], compared[0].models[0].texts[0]
    assert text.same_top == other.same_top and text.perplexity == other.perplexity
    assert text.kld_least is not None and text.kld_least <= other.kld[0]
    assert text.kld[0] == pytest.approx(other.kld[0], abs=0.01)  # of 288 tokens only 8 are kept
    assert len(list(tmp_path.glob("*.kld"))) == 1
    assert "estimates without bias" in html_page(found)


def test_the_command_writes_a_table_a_page_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", str(shared(BASE)), str(shared(SMALL)), str(shared(LARGE)), "--worst", "2"]
    words += ["-f", str(shared(TEXT)), "-c", "128", "--chunks", "2", "-p", "0", "-n", "0"]
    words += ["--device", "cpu"]
    assert main([*words, "--html", "page.html", "--json", "all.json"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.startswith("tiny-llama")]
    assert len(lines) >= 6 and "written: page.html, all.json" in out
    assert re.search("memory +pp t/s +tg t/s\n", out)  # nothing was timed
    found = json.loads((tmp_path / "all.json").read_text())
    assert f"{found['models'][0]['texts'][0]['kld'][0]:.6f}" in out
    assert found["models"][0]["prompt"] is None
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|url\(|<script|@import", page)
    assert page.count("<details") == 2 and "<svg" in page
    assert main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == found | {"seconds": pytest.approx(0, abs=60)}
    assert main([*words, "-sm", "graph", "-ngl", "2"]) == 0
    said = capsys.readouterr().err
    assert "-sm graph changes nothing here" in said and said.count("-ngl changes nothing here") == 1
    assert main([*words, "--html", str(shared(BASE))]) != 0
    capsys.readouterr()
    assert main(["compare", str(shared(BASE)), "no.gguf", "-f", str(shared(TEXT))]) != 0
    message = capsys.readouterr().err
    assert "no.gguf: no such file" in message and "measuring" not in message


def test_names_are_shortened_to_what_differs():
    assert short_labels(["qwen-8b-IQ4_K", "qwen-8b-Q4_K_M"]) == ["IQ4_K", "Q4_K_M"]
    assert short_labels(["qwen-8b", "qwen-8b-Q4_K"]) == ["8b", "8b-Q4_K"]
    assert short_labels(["one"]) == ["one"]
    assert short_labels(["one", "two"]) == ["one", "two"]


def test_the_chart_is_drawn_for_telephones_too(compared):
    """At 420 pixels a chart of 820 would have letters of 7."""
    page = html_page(compared[0])
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and page.count("<svg") == 2
    assert 'aria-labelledby="narrow-chart-title narrow-chart-description"' in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        width = float(re.findall(r'viewBox="0 0 (\d+)', svg)[0])
        assert svg.count('class="mark') == 2 and "nan" not in svg
        assert all(0 <= float(x) <= width for x in re.findall(r'<text[^>]* x="([-\d.]+)"', svg))
        # The legend names what there is: no file has types of ik_llama.cpp.
        assert ">types of llama.cpp<" in svg and "ik_llama" not in svg
    narrow = style.TWO_CHARTS.partition("@media (max-width: 40rem) {")[2]
    assert ".broad { display: none; }" in narrow and ".narrow { display: block; }" in narrow


def test_a_text_that_is_too_short_is_named(compared, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("One line.")
    with pytest.raises(EvaluationError, match=r"short\.txt.*: the text has \d+ tokens"):
        iqforge.compare_models(shared(BASE), [shared(SMALL)], [short], tmp_path / "w", **FAST)


def test_another_vocabulary_is_refused_before_anything_is_measured(tmp_path):
    make_tiny_llama(tmp_path / "hf", n_layers=1)
    paths = []
    with CheckpointSource(open_checkpoint(tmp_path / "hf")) as source:
        tokens = source.metadata["tokenizer.ggml.tokens"].data
        for n_changed in (0, 1, len(tokens) // 20):  # a name that was reserved is no other one
            changed = [f"other{i}" if i < n_changed else one for i, one in enumerate(tokens)]
            metadata = {"tokenizer.ggml.tokens": array(ValueType.STRING, changed)}
            paths.append(write_gguf(tmp_path / f"{n_changed}.gguf", source, metadata=metadata))
    text, measured = tmp_path / "text.txt", []
    text.write_text(PROSE * 10)
    options = {"n_ctx": 32, "chunks": 1, "speed_prompt": 0, "speed_generation": 0}
    compare = partial(
        iqforge.compare_models, paths[0], texts=[text], work=tmp_path / "w", **options
    )
    with pytest.raises(EvaluationError, match=r"gguf: has another vocabulary than .*0\.gguf"):
        compare(paths[1:], on_model=lambda *one: measured.append(one))
    assert not measured and not list((tmp_path / "w").iterdir())
    assert compare(paths[1:2]).models


def test_nothing_to_compare_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="a text"):
        iqforge.compare_models(shared(BASE), [shared(SMALL)], [], tmp_path)
    with pytest.raises(UsageError, match="a model"):
        iqforge.compare_models(shared(BASE), [], [shared(TEXT)], tmp_path)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, 0),
        (420, 1),
        pytest.param(1280, 1, marks=pytest.mark.full),
        pytest.param(420, 0, marks=pytest.mark.full),
    ],
)
def test_nothing_is_cut_off_in_a_browser(compared, width, scheme, tmp_path):
    """The page as a frame of this width in a browser: nothing is wider than the frame, unless it
    scrolls inside its own box.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no headless browser")
    page = html_page(compared[0]).replace("<details", "<details open")
    check = """<script>addEventListener("load", () => {
      const wide = document.documentElement.clientWidth, over = [];
      for (const e of document.querySelectorAll("body *")) {
        const box = e.getBoundingClientRect();
        if (!e.closest(".wide") && (box.right > wide + 1 || box.left < -1)) over.push(e.tagName);
        if (e.className === "wide" && e.scrollWidth > e.clientWidth + 1) over.push("scrolls");
      }
      document.title = "over:" + over.map(e => " " + e).join("") + " dark: " +
        matchMedia("(prefers-color-scheme: dark)").matches + " width: " + wide;
      parent.postMessage(document.title, "*");
    })</script>"""
    frame = tmp_path / "frame.html"
    framed = page.replace("</body>", check + "</body>").replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(
        f'<body><iframe style="border:0" width={width} height=900 srcdoc="{framed}"></iframe>'
        '<script>onmessage = e => document.body.setAttribute("found", e.data)</script></body>'
    )
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000"]
    run = subprocess.run(
        [*command, "--dump-dom", f"file://{frame}"], capture_output=True, text=True, timeout=300
    )
    [found] = re.findall(r'found="([^"]*)"', run.stdout)
    assert found == f"over: dark: {str(scheme == 0).lower()} width: {width}"

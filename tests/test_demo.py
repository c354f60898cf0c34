"""The demo: one run on few chunks, its report and chart as parsers see them, its texts and its
errors.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import resource
import shlex
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import iqforge.api as api
import pytest
from iqforge.cli import COMMANDS, main
from iqforge.demo.chain import MODEL, TYPES, Chain
from iqforge.demo.comparison import compare
from iqforge.demo.text import choose_texts, is_held_out
from iqforge.errors import MalformedFileError, NotFoundError
from iqforge.proof import style
from iqforge.proof.chart import Point, scatter

VOID = {"meta", "link", "br", "hr", "img", "input"}
DRAWN = {"path", "circle", "line", "rect", "polyline"}  # SVG elements written as <path .../>


class Page(HTMLParser):
    """Collects elements, table rows and text; open tags must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.stack, self.elements, self.rows, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        assert tag in DRAWN
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if {"td", "th"} & set(self.stack):
            self.rows[-1][-1] += data

    def having(self, tag: str, word: str) -> list[dict]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and word in attributes.get("class", "").split()
        ]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of a run on three chunks, what it printed, and its report."""
    folder = tmp_path_factory.mktemp("demo") / "made by <demo>"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["demo", "--dir", str(folder), "--chunks", "3"]) == 0
    return folder, printed.getvalue(), (folder / "report.html").read_text(encoding="utf-8")


def number(cell: str) -> float:
    """Return the number at the start of a cell, or NaN if it has none."""
    found = re.match(r"[\d.]+", cell)
    return float(found[0]) if found else math.nan


def test_figures_are_plausible(demo):
    rows = {row[0]: [number(cell) for cell in row[1:]] for row in Page(demo[2]).rows}
    bits, bpw, file, ppl, kld, worst, same = range(7)
    types = {name: rows[name] for name in TYPES}
    assert (
        types["Q8_0"][kld]
        < types["Q6_K"][kld]
        < types["IQ4_K"][kld]
        < types["IQ3_K"][kld]
        < types["IQ2_K"][kld]
        < 3
    )
    assert 0 < types["Q8_0"][kld] < 0.002 and types["IQ4_K"][kld] < types["Q4_K"][kld]
    assert types["IQ4_K_R4"][:7] == types["IQ4_K"][:7]
    for row in types.values():
        assert row[bpw] > row[bits] or row[bpw] >= 8.5
        assert 10 < row[ppl] < 60 and row[worst] > row[kld] and 30 < row[same] <= 100
        assert row[file] < rows["BF16"][file] == pytest.approx(10.1, abs=0.1)
    assert types["Q8_0"][ppl] == pytest.approx(rows["BF16"][ppl], rel=0.01)
    assert math.isnan(rows["BF16"][kld])


def test_printed_table_is_that_of_the_report(demo):
    folder, printed, html = demo
    lines = {
        line.split()[0]: line
        for line in printed.split("same top\n")[1].split("\n\n")[0].splitlines()
    }
    for row in Page(html).rows:
        if row[0] in TYPES:
            for cell in (row[2], row[4], row[5]):
                assert cell in " ".join(lines[row[0]].split())
    assert "3 shards; 47 tensors with 3,337,216 bytes" in printed and "are equal" in printed
    assert [int(n) for n in re.findall(r"^\[(\d)\]", printed, re.MULTILINE)] == [1, 2, 3, 4, 5, 6]
    assert "took" in printed and f"report: {folder}/report.html" in printed


def test_report_stands_alone(demo):
    page = Page(demo[2])
    for _, attributes in page.elements:
        assert not {"src", "href", "xlink:href", "action", "data", "background"} & attributes.keys()
    assert not re.search(r"https?:|url\(|@import|<script", demo[2])
    assert "prefers-color-scheme: dark" in demo[2]


def test_style_sheets_define_every_colour():
    css = style.COLOURS + style.PAGE + style.CHART
    assert css.count("{") == css.count("}")
    light, dark = re.findall(r":root \{([^}]*)\}", css)
    used = set(re.findall(r"var\((--\w+)\)", css))
    assert used == set(re.findall(r"--\w+(?=:)", light)) == set(re.findall(r"--\w+(?=:)", dark))


def chart_labels(path: Path) -> list[str]:
    svg = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg" and svg.get("width") and svg.get("height")
    return sorted(
        group.get("data-label", "") for group in svg.iter() if group.get("class", "")[:5] == "mark "
    )


def test_chart_is_an_image_of_its_own(demo):
    text = (demo[0] / "chart.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and not re.search(r"url\(|@import|<script", text)
    assert chart_labels(demo[0] / "chart.svg") == sorted(TYPES)
    assert "max-width: 100%" in text  # it shrinks on a narrow page


def test_chart_of_the_readme_shows_what_the_demo_shows():
    root = Path(__file__).parents[1]
    assert chart_labels(root / "docs" / "chart.svg") == sorted(TYPES)
    assert "docs/chart.svg" in (root / "README.md").read_text(encoding="utf-8")


def test_report_is_complete_and_accessible(demo):
    page = Page(demo[2])
    names = [name for name, _ in page.elements]
    assert (
        page.elements[0] == ("html", {"lang": "en"})
        and names.count("h1") == names.count("svg") == 1
    )
    assert sorted(mark["data-label"] for mark in page.having("g", "mark")) == sorted(TYPES)
    svg = dict(page.elements)["svg"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert (
        svg["role"] == "img"
        and set(svg["aria-labelledby"].split()) <= set(ids)
        and len(ids) == len(set(ids))
    )
    assert names.count("caption") == names.count("table") == 2 and all(
        "scope" in a for name, a in page.elements if name == "th"
    )
    text = " ".join(page.text)
    for words in (
        "bits per weight of the whole model",
        "mean KL divergence from BF16",
        "cores",
        "3 chunks",
        "CRC-32",
        "--chunks 3",
        "made by <demo>",
        "shards",
    ):
        assert words in text


def test_files_that_are_left(demo):
    names = {path.name for path in demo[0].iterdir()}
    assert names == {
        "report.html",
        "chart.svg",
        "calibration.txt",
        "measuring.txt",
        "imatrix.dat",
        "base.kld",
        "demo-BF16.gguf",
        "demo-IQ4_K-merged.gguf",
        *(f"demo-{type}.gguf" for type in TYPES),
        *(f"demo-IQ4_K-0000{i}-of-00003.gguf" for i in (1, 2, 3)),
    }


def test_comparison_finds_a_difference(demo, tmp_path):
    whole, other = demo[0] / "demo-IQ4_K.gguf", tmp_path / "other.gguf"
    assert "47 tensors" in compare(api, whole, demo[0] / "demo-IQ4_K-00001-of-00003.gguf")
    content = bytearray(whole.read_bytes())
    content[-2000] ^= 1
    other.write_bytes(content)
    with pytest.raises(MalformedFileError, match="data differ"):
        compare(api, whole, other)
    with pytest.raises(MalformedFileError, match="general.file_type"):
        compare(api, whole, demo[0] / "demo-Q4_K.gguf")


def test_texts_share_no_paragraph():
    texts = choose_texts()
    assert texts.calibration_topics > 50 and texts.measuring_topics > 10
    assert len(texts.calibration) > 300_000 and len(texts.measuring) > 70_000 and texts.repeated > 0
    measured = {" ".join(paragraph.split()) for paragraph in texts.measuring.split("\n\n")}
    assert not measured & {
        " ".join(paragraph.split()) for paragraph in texts.calibration.split("\n\n")
    }


def test_texts_of_given_topics():
    names = sorted((f"topic{i}" for i in range(20)), key=lambda name: zlib.crc32(name.encode()))
    topics = {name: f"\nAbout {name}.\n\n   Said\neverywhere.\n" for name in sorted(names)}
    texts = choose_texts(topics)
    held = [name for name in names if is_held_out(name)]
    assert 0 < len(held) == texts.measuring_topics and texts.calibration_topics == 20 - len(held)
    assert texts.measuring == "\n\n".join(f"About {name}." for name in held)
    assert texts.repeated == len(held) * len("   Said\neverywhere.")
    assert all(f"About {name}." in texts.calibration for name in names if name not in held)


def test_python_without_the_text(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(NotFoundError, match="pydoc_data"):
        choose_texts()
    assert (
        main(["demo", "--dir", str(tmp_path / "d")]) == 1
        and "pydoc_data" in capsys.readouterr().err
    )


def test_folder_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere", "a\0b"):
        assert main(["demo", "--dir", str(folder)]) == 1
        err = capsys.readouterr().err
        assert "cannot be written" in err and "Traceback" not in err
    (tmp_path / "d" / "measuring.txt").mkdir(parents=True)
    assert main(["demo", "--dir", str(tmp_path / "d")]) == 1
    assert "it is a folder" in capsys.readouterr().err
    assert (
        main(["demo", "--dir", str(tmp_path), "--chunks", "0"]) == 1
        and "--chunks is 0" in capsys.readouterr().err
    )


def test_no_space(tmp_path, capsys):
    """A limit on the size of files stands in for a full disk. The error names the first file above
    it, and no partial file stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        assert main(["demo", "--dir", str(tmp_path), "--chunks", "1"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert "demo-BF16.gguf" in err and "cannot be written" in err
    assert {path.name for path in tmp_path.iterdir()} == {"calibration.txt", "measuring.txt"}


def test_embedded_model_is_whole():
    assert {path.name for path in MODEL.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    }


def test_chart_of_few_and_of_equal_points():
    one = scatter(
        [Point("A&B", 4.5, 0.0)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        series=("s",),
    )
    assert one.count('class="mark') == 1 and "A&amp;B" in one and "nan" not in one
    same = scatter(
        [Point(f"T{i}", 4.5, 0.05, i % 2, i == 2) for i in range(3)],
        title="t",
        description="d",
        x_label="x",
        y_label="y",
        series=("s", "u"),
    )
    assert (
        same.count('class="mark') == 3
        and same.count('class="enlarged') in (0, 3)
        and "nan" not in same
    )


def test_shown_commands_are_accepted(demo, capsys):
    """The commands that the report shows, with a type in place of TYPE, do what the demo did."""
    commands = [
        shlex.split(row[0][row[0].index("iqforge ") :])
        for row in Page(demo[2]).rows
        if "iqforge " in row[0]
    ]
    assert {words[1] for words in commands} <= COMMANDS.keys() and len(commands) == 6
    for words in commands:
        if words[1] in ("quantize", "gguf-split"):
            assert main([word.replace("TYPE", "Q8_0") for word in words[1:]] + ["--dry-run"]) == 0
    capsys.readouterr()
    words = [word.replace("TYPE", "Q8_0") for word in commands[5][1:]]
    assert main(words) == 0
    shown = re.search(r"Mean    KLD: +([\d.]+)", capsys.readouterr().out)
    assert shown and shown[1] in demo[1]


def test_chain_names_its_files(tmp_path):
    assert Chain(None, tmp_path, 1).file("IQ4_K") == tmp_path / "demo-IQ4_K.gguf"


def test_nothing_is_wider_than_a_telephone(demo):
    """At 420 px the chart shrinks, and the rows of the table become lists with a label for each
    figure.
    """
    narrow = style.PAGE.partition("@media (max-width: 40rem) {")[2]
    assert "svg { min-width: 0;" in narrow and "content: attr(data-label)" in narrow
    assert demo[2].count('<td data-label="') == 9 * (1 + len(TYPES))

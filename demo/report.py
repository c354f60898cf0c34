"""What `iqforge demo` measured, as a text table and as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from ..formats.types import ggml_type
from .chart import Point, scatter

if TYPE_CHECKING:
    from .text import Texts

_FIRST_IK_ID = 97  # type ids above 96 exist in ik_llama.cpp only


@dataclass(frozen=True)
class Stage:
    """One step of the run: its heading, the command that does the same, how long it took."""

    title: str
    command: str
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """One type. Pairs are a value and its standard error; `same_top` is a share, `bits_per_weight`
    that of all tensors.
    """

    type: str
    bits_per_weight: float
    file_bytes: int
    perplexity: tuple[float, float]
    mean_kld: tuple[float, float]
    kld_99: float
    same_top: tuple[float, float]
    quantize_seconds: float
    measure_seconds: float

    @property
    def type_bits(self) -> float:
        return ggml_type(self.type).bits_per_weight

    @property
    def file_mb(self) -> float:
        return self.file_bytes / 1e6


@dataclass(frozen=True)
class Baseline:
    """The unquantized model that the others are compared with."""

    type: str
    bits_per_weight: float
    file_bytes: int
    perplexity: tuple[float, float]
    measure_seconds: float


@dataclass(frozen=True)
class Demo:
    """Everything the report tells. `split` is a sentence on what splitting and merging left equal."""

    baseline: Baseline
    measurements: Sequence[Measurement]
    stages: Sequence[Stage]
    texts: Texts
    n_parameters: int
    n_ctx: int
    calibration_windows: int
    measuring_windows: int
    embedding_type: str
    split: str
    command: str

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def text_table(demo: Demo) -> str:
    """One line per type, the baseline first."""
    base = demo.baseline
    lines = [
        (
            f"{'type':<10} {'bpw':>6} {'file MB':>8} {'PPL':>18} {'mean KLD':>21} {'99% KLD':>9}"
            f" {'same top':>9}"
        ),
        (
            f"{base.type:<10} {base.bits_per_weight:6.2f} {base.file_bytes / 1e6:8.2f}"
            f" {_pair(base.perplexity, 3):>18} {'-':>21} {'-':>9} {'-':>9}"
        ),
    ]
    lines += [
        f"{m.type:<10} {m.bits_per_weight:6.2f} {m.file_mb:8.2f} {_pair(m.perplexity, 3):>18}"
        f" {_pair(m.mean_kld, 6):>21} {m.kld_99:9.5f} {100 * m.same_top[0]:7.2f} %"
        for m in demo.measurements
    ]
    return "\n".join(lines)


def _pair(pair: tuple[float, float], digits: int) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def html_report(demo: Demo) -> str:
    """A page with table, chart, explanations and timings; no script, and nothing is loaded from
    anywhere.
    """
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _facts(demo)
    )
    notes = "".join(
        f"<div><h3>{escape(heading)}</h3><p>{escape(text)}</p></div>"
        for heading, text in _notes(demo)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>iqforge demo: size and loss of quantized models</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header>
<h1>How much does each type lose?</h1>
<p class="lead">{_lead(demo)}</p>
</header>
<section aria-labelledby="chart-heading">
<h2 id="chart-heading">Loss against size</h2>
<figure>
<div class="wide" role="group" aria-label="Chart" tabindex="0">{_chart(demo)}</div>
<figcaption>Further down is closer to the unquantized model, further left is smaller. The vertical axis is logarithmic.</figcaption>
</figure>
</section>
<section aria-labelledby="table-heading">
<h2 id="table-heading">Figures</h2>
<div class="wide" role="group" aria-label="Table of figures" tabindex="0">{_table(demo)}</div>
</section>
<section aria-labelledby="notes-heading">
<h2 id="notes-heading">How to read this</h2>
<div class="notes">{notes}</div>
</section>
<section aria-labelledby="stages-heading">
<h2 id="stages-heading">What was run</h2>
{_stages(demo)}
<dl>{facts}</dl>
</section>
</main>
</body>
</html>
"""


def _lead(demo: Demo) -> str:
    """The result in a few sentences, about the type of about four bits that loses least and the one
    that loses most.
    """
    near_four = [m for m in demo.measurements if 4 <= m.type_bits < 5] or demo.measurements
    best, worst = (
        min(near_four, key=lambda m: m.mean_kld[0]),
        max(demo.measurements, key=lambda m: m.mean_kld[0]),
    )
    size = _percent(best.file_bytes / demo.baseline.file_bytes, 0)
    return (
        f"The embedded model was quantized to {len(demo.measurements)} types, and each result"
        " compared with the unquantized model. Of the types with about four bits"
        f" <strong>{escape(best.type)}</strong> loses least: its file has {size} of the size, and"
        f" the most probable next token is the same in {_percent(best.same_top[0], 1)} of all"
        f" places. With <strong>{escape(worst.type)}</strong> it is the same in"
        f" {_percent(worst.same_top[0], 1)}."
    )


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}&nbsp;%"


def _chart(demo: Demo) -> str:
    points = []
    for m in demo.measurements:
        covered = any((p.x, p.y) == (m.bits_per_weight, m.mean_kld[0]) for p in points)
        points.append(
            Point(
                m.type,
                m.bits_per_weight,
                m.mean_kld[0],
                int(ggml_type(m.type).id >= _FIRST_IK_ID),
                covered,
            )
        )
    listed = ", ".join(f"{p.label} {p.y:.3g} at {p.x:.2f}" for p in points)
    return scatter(
        points,
        title="Mean KL divergence against bits per weight",
        description=f"Divergence at bits per weight: {listed}.",
        x_label="bits per weight of the whole model",
        y_label="mean KL divergence from BF16",
        series=("type of llama.cpp", "type of ik_llama.cpp"),
    )


_COLUMNS = (
    ("Type", "name of the tensor type"),
    ("Bits", "bits per weight of the type itself"),
    ("bpw", "bits per weight over all tensors of the model"),
    ("File", "size of the GGUF file in megabytes"),
    ("PPL", "perplexity with its standard error"),
    ("Mean KLD", "mean KL divergence from BF16 with its standard error"),
    ("99 % KLD", "divergence that one token in a hundred exceeds"),
    ("Same top", "share of tokens with the same most probable continuation"),
    ("Quantize", "time to quantize, which includes compiling the search the first time"),
    ("Measure", "time to measure"),
)


def _table(demo: Demo) -> str:
    base = demo.baseline
    head = "".join(
        f'<th scope="col"><abbr title="{escape(meaning)}">{escape(name)}</abbr></th>'
        for name, meaning in _COLUMNS
    )
    rows = [
        [
            base.type,
            f"{ggml_type(base.type).bits_per_weight:.2f}",
            f"{base.bits_per_weight:.2f}",
            f"{base.file_bytes / 1e6:.2f} MB",
            _error(base.perplexity, 3),
            "–",
            "–",
            "–",
            "–",
            f"{base.measure_seconds:.1f} s",
        ]
    ]
    rows += [
        [
            m.type,
            f"{m.type_bits:.2f}",
            f"{m.bits_per_weight:.2f}",
            f"{m.file_mb:.2f} MB",
            _error(m.perplexity, 3),
            _error(m.mean_kld, 6),
            f"{m.kld_99:.4f}",
            _percent(m.same_top[0], 2),
            f"{m.quantize_seconds:.1f} s",
            f"{m.measure_seconds:.1f} s",
        ]
        for m in demo.measurements
    ]
    body = "\n".join(
        f'<tr{" class=base" if not index else ""}><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return (
        f'<table class="figures"><caption>Each type against {escape(base.type)}, the unquantized'
        f" model</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    )


def _error(pair: tuple[float, float], digits: int) -> str:
    return f'{pair[0]:.{digits}f} <span class="error">± {pair[1]:.{digits}f}</span>'


def _stages(demo: Demo) -> str:
    rows = "".join(
        "<tr><th"
        f" scope=row>{escape(s.title)}<code>{escape(s.command)}</code></th><td>{s.seconds:.1f}"
        " s</td></tr>"
        for s in demo.stages
    )
    return (
        '<table class="stages"><caption>Stages, the commands that do the same, and their'
        ' times</caption><thead><tr><th scope="col">Stage</th><th'
        f' scope="col">Time</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><th'
        f' scope="row">Total</th><td>{demo.seconds:.1f} s</td></tr></tfoot></table>'
    )


def _notes(demo: Demo) -> list[tuple[str, str]]:
    """Headings and texts."""
    texts = demo.texts
    return [
        (
            "KL divergence (KLD)",
            (
                "How far the predicted probabilities of the next token are from those of the"
                f" {demo.baseline.type} model, in nats, averaged over all measured tokens. Zero"
                " means the same predictions. It sees what perplexity (PPL) averages away."
            ),
        ),
        (
            "Sizes",
            (
                "bpw counts all tensors. Token embeddings, which are the output matrix too, are"
                f" {demo.embedding_type} in every file; in a model this small they are a fifth of"
                " all weights. Norms stay F32. The column Bits has the type alone."
            ),
        ),
        (
            "A small model",
            (
                f"{demo.n_parameters / 1e6:.0f} million parameters have nothing to spare: models of"
                " practical size lose far less at the same bits. Compare the types with one"
                " another here, not with figures of other models."
            ),
        ),
        (
            "Interleaved rows",
            (
                "IQ4_K_R4 holds the values of IQ4_K with rows interleaved by fours. Both lie on the"
                " same point of the chart, and all their figures are equal."
            ),
        ),
        (
            "Texts",
            (
                "Both come from the language reference inside Python (pydoc_data.topics). The"
                f" {texts.measuring_topics} topics whose name has a CRC-32 divisible by five were"
                f" kept out of the model's training; they are measured on: {demo.measuring_windows}"
                f" windows of {demo.n_ctx} tokens, the second half of each scored."
                f" {texts.repeated:,} characters that other topics repeat were left out. The other"
                f" {texts.calibration_topics} topics calibrate: {demo.calibration_windows} windows."
                " Topics come in order of their CRC-32."
            ),
        ),
        ("Split and merge", demo.split),
    ]


def _facts(demo: Demo) -> list[tuple[str, str]]:
    """Names and values: what was run, where."""
    import platform
    from importlib.metadata import version

    from ..quantize.run.stream import default_threads
    from ..version import __version__

    software = ", ".join(
        f"{package} {version(package)}" for package in ("torch", "numba", "numpy", "tokenizers")
    )
    return [
        ("Version", f"iqforge {__version__}"),
        ("Command", demo.command),
        ("Machine", f"{default_threads()} cores, {platform.machine()}, {platform.system()}"),
        ("Software", f"Python {platform.python_version()}, {software}"),
        (
            "Model",
            f"Llama, {demo.n_parameters / 1e6:.2f} million parameters, embedded in the package",
        ),
    ]


_STYLE = """
:root { --page: #fbfaf8; --card: #ffffff; --ink: #1d2125; --soft: #59626b; --line: #dfe1e4; --strong: #b9bec4;
        --first: #0b6a93; --second: #b8450f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2024; --ink: #e7e9eb; --soft: #a3acb5; --line: #30363c; --strong: #525a62;
          --first: #62c3ea; --second: #ff9c66; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.015em; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .9rem; }
.notes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.1rem 2.5rem; }
h3 { font-size: 1rem; margin: 0 0 .1rem; }
p { margin: 0; max-width: 46rem; }
.lead { font-size: 1.1rem; color: var(--soft); }
.lead strong { color: var(--ink); }
figure { margin: 0; }
figcaption, caption { color: var(--soft); font-size: .9rem; }
figcaption { margin-top: .6rem; }
caption { text-align: left; padding: 0 0 .6rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; }
.wide:focus-visible { outline: 2px solid var(--first); outline-offset: 2px; }
svg { display: block; width: 100%; min-width: 620px; height: auto; font-size: 13px; }
svg text { fill: var(--ink); }
.grid line { stroke: var(--line); }
.grid line.strong { stroke: var(--strong); }
.grid text { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .axis { font-size: 14px; }
.series0 circle, .series0 path, .series1 circle, .series1 path { stroke: var(--card); stroke-width: 1.5; }
.mark text, .enlarged text { font-weight: 600; }
.series0 circle, .series0 path { fill: var(--first); }
.series1 circle, .series1 path { fill: var(--second); }
.series0 .ring, .series1 .ring { fill: none; stroke: var(--first); stroke-width: 2; }
.series1 .ring { stroke: var(--second); }
.tie { fill: none; stroke: var(--strong); stroke-width: 1; }
.panel { fill: var(--card); stroke: var(--strong); }
.frontier { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .42rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
.figures { font-size: .93rem; }
.figures th, .figures td { padding-inline: .5rem; }
thead th { color: var(--soft); font-weight: 600; font-size: .9rem; border-bottom-color: var(--strong); }
th:first-child { text-align: left; }
tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tr.base > * { background: color-mix(in srgb, var(--line) 35%, transparent); }
abbr { text-decoration: underline dotted var(--strong); text-underline-offset: 3px; cursor: help; }
.error { color: var(--soft); font-size: .88em; }
.stages th { white-space: normal; }
.stages td { vertical-align: top; }
.stages code { display: block; font-weight: 400; color: var(--soft); font-size: .84rem; overflow-wrap: anywhere; }
.stages tfoot > tr > * { border-top: 1px solid var(--strong); border-bottom: 0; font-weight: 600; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 1rem 1.5rem; margin: 2rem 0 0; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""

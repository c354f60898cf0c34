"""The report of `iqforge demo`: one HTML page without references to other files, and its chart."""

from __future__ import annotations

from html import escape

from ..formats.types import ggml_type
from ..proof import style
from ..proof.chart import Point, scatter, standalone
from .figures import Demo

_FIRST_IK_ID = 97  # type ids above 96 exist in ik_llama.cpp only


def html_report(demo: Demo) -> str:
    """Return a page with chart, table, explanations and timings. It has no script and loads
    nothing.
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
<style>{style.COLOURS}{style.PAGE}{style.CHART}</style>
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
<figcaption>Lower is closer to the unquantized model. Further left is smaller.
The vertical axis is logarithmic.</figcaption>
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
    """Return the result in a few sentences: the best type of about four bits, and the type that
    loses most.
    """
    near_four = [m for m in demo.measurements if 4 <= m.type_bits < 5] or demo.measurements
    best, worst = (
        min(near_four, key=lambda m: m.mean_kld[0]),
        max(demo.measurements, key=lambda m: m.mean_kld[0]),
    )
    size = _percent(best.file_bytes / demo.baseline.file_bytes, 0)
    return (
        f"The embedded model was quantized to {len(demo.measurements)} types, and each result was"
        " compared with the unquantized model. Of the types with about four bits,"
        f" <strong>{escape(best.type)}</strong> loses least: its file has {size} of the size, and"
        f" the most probable next token is the same at {_percent(best.same_top[0], 1)} of all"
        f" positions. With <strong>{escape(worst.type)}</strong> it is the same at"
        f" {_percent(worst.same_top[0], 1)}."
    )


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f}&nbsp;%"


def svg_chart(demo: Demo) -> str:
    """Return the chart as an SVG file."""
    return standalone(_chart(demo), style.COLOURS + style.CHART)


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
    ("99 % KLD", "KL divergence that one token in a hundred exceeds"),
    ("Same top", "share of positions with the same most probable next token"),
    ("Quantize", "time to quantize, without compiling the search"),
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
        + "".join(
            f'<td data-label="{escape(name)}">{cell}</td>'
            for (name, _), cell in zip(_COLUMNS[1:], row[1:], strict=True)
        )
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
        '<table class="stages"><caption>Stages, the equivalent commands, and their'
        ' times</caption><thead><tr><th scope="col">Stage</th><th'
        f' scope="col">Time</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><th'
        f' scope="row">Total</th><td>{demo.seconds:.1f} s</td></tr></tfoot></table>'
    )


def _notes(demo: Demo) -> list[tuple[str, str]]:
    """Return headings and texts."""
    texts = demo.texts
    return [
        (
            "KL divergence (KLD)",
            (
                "How far the predicted probabilities of the next token are from those of the"
                f" {demo.baseline.type} model, in nats, averaged over all measured tokens. Zero"
                " means equal predictions. It shows differences that perplexity (PPL) averages"
                " away."
            ),
        ),
        (
            "Sizes",
            (
                "bpw counts all tensors. The token embeddings, also used as output matrix, are"
                f" {demo.embedding_type} in every file; in a model this small they are a fifth of"
                " all weights. Norms stay F32. The column Bits counts the type alone."
            ),
        ),
        (
            "A small model",
            (
                f"A model of {demo.n_parameters / 1e6:.0f} million parameters has nothing to spare:"
                " models of practical size lose far less at the same bits. Compare the types with"
                " each other, not with figures of other models."
            ),
        ),
        (
            "Interleaved rows",
            (
                "IQ4_K_R4 stores the values of IQ4_K with rows interleaved in groups of four. Both"
                " are at the same point of the chart, and all their figures are equal."
            ),
        ),
        (
            "Texts",
            (
                "Both texts come from the language reference that Python includes"
                " (pydoc_data.topics). The"
                f" {texts.measuring_topics} topics whose name has a CRC-32 divisible by five were"
                " not part of the model's training text. They are the measuring text:"
                f" {demo.measuring_chunks} chunks of {demo.n_ctx} tokens, of which the second half"
                f" is scored. {texts.repeated:,} characters that repeat other topics were left out."
                f" The other {texts.calibration_topics} topics are the calibration text:"
                f" {demo.calibration_chunks} chunks. Topics are in order of their CRC-32."
            ),
        ),
        ("Split and merge", demo.split),
    ]


def _facts(demo: Demo) -> list[tuple[str, str]]:
    """Return names and values: what was run, and where."""
    import platform
    from importlib.metadata import version

    from ..quantize.run.parallel import default_threads
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

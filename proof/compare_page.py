"""The page of `iqforge compare`: one HTML file without references to other files, to publish next
to a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..formats.ftypes import FILE_TYPES
from ..runtime.evaluate.comparison import Comparison, Difference, ModelFigures, TextFigures
from . import style
from .chart import Point, scatter
from .figures import best_of, kld, size_of, speed

_FIRST_IK_NUMBER = 135  # file types of ik_llama.cpp alone have numbers from here on


def html_page(comparison: Comparison, facts: Sequence[tuple[str, str]] = ()) -> str:
    """Return a page with a chart, tables, the tokens that differ most, and what was run. It has no
    script and loads nothing. facts: more names and values for the end of the page.
    """
    base = comparison.base
    texts = "".join(_text(comparison, index) for index in range(len(base.texts)))
    differences = "".join(_differences(model) for model in comparison.models)
    if differences:
        differences = (
            '<section aria-labelledby="tokens-heading"><h2 id="tokens-heading">Where predictions'
            f" differ most</h2>{differences}</section>"
        )
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in [*_facts(comparison), *facts]
    )
    notes = "".join(
        f"<div><h3>{escape(heading)}</h3><p>{escape(text)}</p></div>"
        for heading, text in _notes(comparison)
    )
    title = f"{base.name} and its quantized models"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style.COLOURS}{style.PAGE}{style.CHART}{style.TWO_CHARTS}{style.TOKENS}</style>
</head>
<body>
<main>
<header>
<h1>How much of {escape(base.name)} is left?</h1>
<p class="lead">{_lead(comparison)}</p>
</header>
{_chart_section(comparison)}
<section aria-labelledby="models-heading">
<h2 id="models-heading">Size, memory and speed</h2>
<div class="wide" role="group" aria-label="Table of models" tabindex="0">{_models(comparison)}</div>
</section>
{texts}
{differences}
<section aria-labelledby="notes-heading">
<h2 id="notes-heading">How to read this</h2>
<div class="notes">{notes}</div>
</section>
<section aria-labelledby="run-heading">
<h2 id="run-heading">What was measured</h2>
<dl>{items}</dl>
</section>
</main>
</body>
</html>
"""


def _lead(comparison: Comparison) -> str:
    base, best = comparison.base, best_of(comparison)
    text = best.texts[0]
    share = 100 * best.file_bytes / base.file_bytes
    one = len(comparison.models) == 1
    which = "" if one else f" Of {len(comparison.models)} models it is the one that loses least."
    same = 100 * text.same_top[0] if text.same_top else 0.0
    return (
        f"<strong>{escape(best.name)}</strong> has {share:.0f}&nbsp;% of the size of"
        f" {escape(base.name)}. Its most probable next token is the same at {same:.1f}&nbsp;% of"
        f" all positions, and the mean KL divergence of its predictions is {kld(text)[0]:.4f}."
        f"{which}"
    )


def _chart_section(comparison: Comparison) -> str:
    if len(comparison.models) < 2:
        return ""
    points: list[Point] = []
    for model in comparison.models:
        value = kld(model.texts[0])[0]
        covered = any((p.x, p.y) == (model.bits_per_weight, value) for p in points)
        file_type = FILE_TYPES.get(model.type)
        is_ik = file_type is not None and file_type.number >= _FIRST_IK_NUMBER
        points.append(Point(model.label, model.bits_per_weight, value, int(is_ik), covered))
    listed = ", ".join(f"{p.label} {p.y:.3g} at {p.x:.2f}" for p in points)
    broad, narrow = (
        scatter(
            points,
            title="Mean KL divergence against bits per weight",
            description=f"Divergence at bits per weight: {listed}.",
            x_label="bits per weight of the whole model",
            y_label="mean KL divergence",
            series=("types of llama.cpp", "types of ik_llama.cpp"),
            narrow=is_narrow,
        )
        for is_narrow in (False, True)
    )
    name = escape(_short(comparison.base.texts[0].text))
    return f"""<section aria-labelledby="chart-heading">
<h2 id="chart-heading">Loss against size</h2>
<figure>
<div class="wide" role="group" aria-label="Chart" tabindex="0">
<div class="broad">{broad}</div><div class="narrow">{narrow}</div></div>
<figcaption>Measured on {name}. Lower is closer to {escape(comparison.base.name)}. Further left is
smaller. The vertical axis is logarithmic.</figcaption>
</figure>
</section>"""


_MODELS = (
    ("Model", "name of the file"),
    ("Type", "what the file says it was quantized to"),
    ("bpw", "bits per weight over all tensors"),
    ("File", "size of the files"),
    ("Memory", "weights, cache and buffers with a context of the measurement"),
    ("Prompt", "tokens of a prompt per second"),
    ("Generation", "generated tokens per second"),
)


def _models(comparison: Comparison) -> str:
    rows = [
        [
            escape(model.name),
            escape(model.type),
            f"{model.bits_per_weight:.2f}",
            size_of(model.file_bytes),
            size_of(model.memory),
            _speed(model.prompt),
            _speed(model.generation),
        ]
        for model in (comparison.base, *comparison.models)
    ]
    device = escape(comparison.base.device)
    n_prompt = comparison.base.n_prompt
    prompts = f"; prompts of {n_prompt} tokens" if n_prompt else ""
    return _table(_MODELS, rows, f"On {device}{prompts}")


def _speed(value: float | None) -> str:
    return "–" if value is None else f"{speed(value)} t/s"


_COLUMNS = (
    ("Model", "name of the file"),
    ("PPL", "perplexity with its standard error"),
    ("Ratio", "perplexity divided by that of the base"),
    ("Mean KLD", "mean KL divergence from the base with its standard error"),
    ("Median", "KL divergence that half of all tokens exceed"),
    ("90 %", "KL divergence that one token in ten exceeds"),
    ("99 %", "KL divergence that one token in a hundred exceeds"),
    ("99.9 %", "KL divergence that one token in a thousand exceeds"),
    ("Max", "largest KL divergence"),
    ("Same top", "share of positions with the same most probable next token"),
)


def _text(comparison: Comparison, index: int) -> str:
    rows = [_row(model, model.texts[index]) for model in (comparison.base, *comparison.models)]
    text = comparison.base.texts[index]
    caption = (
        f"{text.n_tokens:,} tokens scored in {text.n_chunks:,} chunks of {text.n_ctx:,} tokens, the"
        " second half of each"
    )
    heading = f"text-{index}"
    return (
        f'<section aria-labelledby="{heading}"><h2 id="{heading}">Loss on'
        f' {escape(_short(text.text))}</h2><div class="wide" role="group" aria-label="Table of'
        f' losses" tabindex="0">{_table(_COLUMNS, rows, caption)}</div></section>'
    )


def _row(model: ModelFigures, text: TextFigures) -> list[str]:
    row = [escape(model.name), _error(text.perplexity, 3)]
    if text.kld is None or text.ratio is None or text.same_top is None:
        return row + ["–"] * (len(_COLUMNS) - len(row))
    quantiles = [f"{text.quantile(fraction):.4f}" for fraction in (0.5, 0.9, 0.99, 0.999, 1.0)]
    same = f"{100 * text.same_top[0]:.2f}&nbsp;%"
    return [*row, f"{text.ratio[0]:.4f}", _error(text.kld, 5), *quantiles, same]


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table whose cells are HTML; the first row is the base."""
    head = "".join(
        f'<th scope="col"><abbr title="{escape(meaning)}">{escape(name)}</abbr></th>'
        for name, meaning in columns
    )
    body = "\n".join(
        f'<tr{" class=base" if not index else ""}><th scope="row">{row[0]}</th>'
        + "".join(
            f'<td data-label="{escape(name)}">{cell}</td>'
            for (name, _), cell in zip(columns[1:], row[1:], strict=True)
        )
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return (
        f'<table class="figures"><caption>{caption}</caption><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table>"
    )


def _error(value: tuple[float, float], digits: int) -> str:
    return f'{value[0]:.{digits}f} <span class="error">± {value[1]:.{digits}f}</span>'


def _differences(model: ModelFigures) -> str:
    lists = ""
    for text in model.texts:
        items = "".join(f"<li>{_difference(one)}</li>" for one in text.differences)
        heading = f"<h3>{escape(_short(text.text))}</h3>" if len(model.texts) > 1 else ""
        lists += f"{heading}<ol>{items}</ol>" if items else ""
    if not lists:
        return ""
    return f'<details class="tokens"><summary>{escape(model.name)}</summary>{lists}</details>'


def _difference(one: Difference) -> str:
    def best(predictions) -> str:
        return ", ".join(
            f"<code>{_visible(p.text)}</code> {100 * p.probability:.1f}&nbsp;%" for p in predictions
        )

    context = _visible(one.context[-160:])
    return (
        f'<p class="context">…{context}<mark>{_visible(one.target)}</mark></p>'
        f"<p><b>{one.divergence:.3f}</b> Base: {best(one.base)}. Model: {best(one.model)}.</p>"
    )


def _visible(text: str) -> str:
    """Return text of tokens as HTML; line breaks and other control characters become signs."""
    signs = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    shown = "".join(signs.get(c, c if c.isprintable() else "�") for c in text)
    return escape(shown) or "∅"


def _short(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _notes(comparison: Comparison) -> list[tuple[str, str]]:
    base = comparison.base
    notes = [
        (
            "KL divergence (KLD)",
            "How far the predicted probabilities of the next token are from those of"
            f" {base.name}, in nats. Zero means equal predictions. The mean is over all scored"
            " tokens; the quantiles show how rare large deviations are.",
        ),
        (
            "Perplexity (PPL)",
            "How well a model predicts the text. It averages away differences that go both ways, so"
            " a ratio near one does not mean that predictions are the same.",
        ),
        (
            "Size and memory",
            "bpw counts the bits of all tensors. Memory is that of weights, cache and buffers on"
            " the device of the measurement, as iqforge plans it.",
        ),
    ]
    if any(text.kld_least is not None for model in comparison.models for text in model.texts):
        notes.append(
            (
                "Compact base file",
                "Predictions of the base were kept as the most probable tokens, what remains, and a"
                " sample of it: mean KL divergences are estimates without bias.",
            )
        )
    return notes


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    import platform
    from importlib.metadata import version

    from ..runtime.bench.record import cpu_name
    from ..version import __version__

    base = comparison.base
    return [
        ("Version", f"iqforge {__version__}"),
        ("Base", f"{base.name}, {base.type}, {base.n_parameters / 1e6:,.1f} million parameters"),
        ("Architecture", base.architecture),
        ("Device", base.device),
        ("Machine", f"{cpu_name()}, {platform.machine()}, {platform.system()}"),
        ("Software", f"Python {platform.python_version()}, torch {version('torch')}"),
    ]

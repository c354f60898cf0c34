"""A heat map of quantization errors as one HTML page that needs nothing but itself: a row per
tensor, a column per type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from ...errors import printable
from ...formats.types import GGMLType
from ..plan.type_errors import ErrorSums, TensorStats
from .stats import StatsReport

_DARK_FROM = 0.52  # part of the scale from which text is written in the other colour


def html_report(report: StatsReport) -> str:
    """The page. Colour is the relative error on a logarithmic scale, weighted where importances
    were given.
    """
    scale = _Scale(
        [
            _error(sums, report.weighted)
            for tensor in report.tensors
            for sums in tensor.errors.values()
        ]
    )
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _facts(report)
    )
    totals = _cells(report, [report.total(type) for type in report.types], scale, report.weighted)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>iqforge quantize-stats: errors by tensor and type</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>What each type loses on each tensor</h1>
<p class="lead">{_lead(report)}</p>
{scale.legend()}
<div class="wide" role="group" aria-label="Heat map" tabindex="0"><table>
<thead><tr><th scope="col">Tensor</th>{"".join(_heading(type) for type in report.types)}</tr></thead>
<tbody class="all"><tr><th scope="row">all tensors</th>{totals}</tr></tbody>
{"".join(_section(report, role, tensors, scale) for role, tensors in _by_role(report.tensors).items())}
</table></div>
<dl>{facts}</dl>
</main>
</body>
</html>
"""


def _error(sums: ErrorSums, weighted: bool) -> float:
    return sums.weighted_rmse if weighted else sums.relative_rmse


class _Scale:
    """Errors to places 0..1 on a logarithmic scale."""

    def __init__(self, errors: Sequence[float]):
        positive = [error for error in errors if error > 0] or [1.0]
        self.low, self.high = min(positive), max(positive)

    def place(self, error: float) -> float:
        if error <= self.low or self.high == self.low:
            return 0.0
        return math.log(error / self.low) / math.log(self.high / self.low)

    def legend(self) -> str:
        middle = math.sqrt(self.low * self.high)
        ticks = "".join(
            f"<span>{_percent(value)}&nbsp;%</span>" for value in (self.low, middle, self.high)
        )
        return (
            '<div class="legend" aria-hidden="true"><div class="bar"></div><div'
            f' class="ticks">{ticks}</div></div>'
        )


def _percent(error: float) -> str:
    """Three digits, without an exponent."""
    value = 100 * error
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _by_role(tensors: Sequence[TensorStats]) -> dict[str, list[TensorStats]]:
    """Tensors that do the same in different layers together, in the order in which the first of
    them comes.
    """
    roles: dict[str, list[TensorStats]] = {}
    for tensor in tensors:
        roles.setdefault(_short(tensor.tensor.name)[1], []).append(tensor)
    return roles


def _short(name: str) -> tuple[str, str]:
    """("blk.3", "ffn_up") of blk.3.ffn_up.weight; the layer is empty for other names."""
    found = re.fullmatch(r"(?:(.*\.\d+)\.)?(.*?)(?:\.weight)?", name, re.DOTALL)
    return found[1] or "", found[2]


def _heading(type: GGMLType) -> str:
    return f'<th scope="col">{escape(type.name)}<small>{type.bits_per_weight:.4g} bits</small></th>'


def _section(report: StatsReport, role: str, tensors: Sequence[TensorStats], scale: _Scale) -> str:
    rows = []
    for stats in tensors:
        layer = _short(stats.tensor.name)[0] or role
        title = (
            f"{printable(stats.tensor.name)}, {' x '.join(map(str, stats.tensor.shape))},"
            f" {stats.tensor.type}"
        )
        sums = [stats.errors.get(type.name) for type in report.types]
        cells = _cells(report, sums, scale, stats.weighted)
        rows.append(
            '<tr><th scope="row"'
            f' title="{escape(title)}">{escape(printable(layer, 60))}</th>{cells}</tr>'
        )
    heading = ""
    if _short(tensors[0].tensor.name)[0]:  # else the one row says it all
        name = escape(printable(role, 60))
        heading = (
            f'<tr class="role"><th colspan="{1 + len(report.types)}"'
            f' scope="rowgroup"><span>{name}</span></th></tr>'
        )
    return f"<tbody>{heading}{''.join(rows)}</tbody>\n"


def _cells(
    report: StatsReport, row: Sequence[ErrorSums | None], scale: _Scale, weighted: bool
) -> str:
    return "".join(_cell(sums, scale, weighted, report.weighted) for sums in row)


def _cell(sums: ErrorSums | None, scale: _Scale, weighted: bool, coloured_by_weighted: bool) -> str:
    if sums is None or not sums.n_elements:
        return '<td class="none" title="the rows cannot have this type">–</td>'
    error = _error(sums, coloured_by_weighted)
    place = scale.place(error)
    title = f"{sums.type}: relative {_percent(sums.relative_rmse)} %"
    title += f", weighted {_percent(sums.weighted_rmse)} %" if weighted else ""
    title += (
        f", rmse {sums.rmse:.3e}, largest error {sums.largest_error:.3e},"
        f" {sums.bits_per_weight:.4f} bits per weight"
    )
    kind = ' class="deep"' if place >= _DARK_FROM else ""
    return (
        f'<td{kind} style="--p:{100 * place:.0f}%" title="{escape(title)}">{_percent(error)}</td>'
    )


def _lead(report: StatsReport) -> str:
    what = (
        "each column counts by its importance, as the calibration text drives it"
        if report.weighted
        else "all columns count alike, as no importance matrix was given"
    )
    rows = (
        f" About {report.sampled} evenly spaced rows of each tensor were measured."
        if report.sampled
        else ""
    )
    return (
        f"{len(report.tensors)} tensors were quantized to {len(report.types)} types and decoded"
        " again. A cell is the root mean square of the error in percent of that of the weights;"
        f" {what}.{rows} Types come in the order of their bits per weight."
    )


def _facts(report: StatsReport) -> list[tuple[str, str]]:
    from ...version import __version__

    rows, total = (
        sum(values) for values in zip(*((t.rows, t.tensor.n_rows) for t in report.tensors))
    )
    facts = [
        ("Version", f"iqforge {__version__}"),
        ("Model", printable(report.model)),
        ("Rows measured", f"{rows:,} of {total:,}"),
    ]
    if report.imatrix is not None:
        known = sum(tensor.weighted for tensor in report.tensors)
        facts.append(
            (
                "Importance matrix",
                f"{printable(report.imatrix)}, {known} of {len(report.tensors)} tensors",
            )
        )
    return facts


_STYLE = """
:root { --page: #fbfaf8; --card: #ffffff; --ink: #1d2125; --soft: #59626b; --line: #dfe1e4; --strong: #b9bec4;
        --low: #f3f7fa; --high: #0b4f71; --on-high: #ffffff; --focus: #0b6a93; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2024; --ink: #e7e9eb; --soft: #a3acb5; --line: #30363c; --strong: #525a62;
          --low: #1f262c; --high: #8fd8f7; --on-high: #0d1317; --focus: #62c3ea; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 100rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2rem); line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.015em; }
.lead { margin: 0; max-width: 48rem; color: var(--soft); }
.legend { max-width: 24rem; margin: 1.25rem 0; font-size: .85rem; color: var(--soft); }
.bar { height: .8rem; border-radius: 4px; border: 1px solid var(--line);
       background: linear-gradient(in oklab to right, var(--low), var(--high)); }
.ticks { display: flex; justify-content: space-between; font-variant-numeric: tabular-nums; }
.wide { overflow: auto; max-height: 85vh; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.wide:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; background: var(--card); }
thead th { position: sticky; top: 0; z-index: 2; border-bottom: 1px solid var(--strong); vertical-align: bottom; }
th:first-child { position: sticky; left: 0; z-index: 1; text-align: left; border-right: 1px solid var(--line); }
thead th:first-child { z-index: 3; }
tbody th { font-weight: 400; max-width: 11rem; overflow: hidden; text-overflow: ellipsis; }
.all th, .role th { font-weight: 600; }
.role th:first-child { position: static; padding-top: .9rem; border-right: 0; max-width: none; }
.role span { position: sticky; left: .55rem; }
small { display: block; font-weight: 400; color: var(--soft); }
td { background: color-mix(in oklab, var(--high) var(--p, 0%), var(--low)); border: 1px solid var(--card); }
td.deep { color: var(--on-high); }
td.none { background: none; color: var(--soft); text-align: center; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: 1rem 1.5rem; margin: 2rem 0 0; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 3rem; }
  table { font-size: .78rem; }
  th, td { padding: .25rem .4rem; }
  tbody th { max-width: 6.5rem; }
}
"""

"""Show the errors of `collect_stats` as one HTML page that loads nothing: totals by type, the worst
tensors, a map of layers by roles for each type, and all tensors in a table that can be sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from ...errors import printable
from ...formats.tensor_names import TensorName
from ...formats.types import GGMLType
from ..plan.type_errors import ErrorSums, TensorStats
from .stats import StatsReport
from .stats_page import SCRIPT, STYLE

_WORST = 5
_SMALLEST_REACH = 0.25  # of the colours, as a logarithm to base 2: smaller differences look small
_MOST_PANELS = 3  # types whose maps are shown at once; more are chosen from a list


def html_report(report: StatsReport) -> str:
    """Return the page. The error of a cell is weighted if importances were given. Its colour says
    how far it is above or below the mean of its type.
    """
    page = _Page(report)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>iqforge quantize-stats: errors by tensor and type</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Errors by tensor and type</h1>
<p class="lead">{_lead(report)}</p>
{page.totals()}
{page.legend()}
{page.panels()}
<h2>All tensors</h2>
<p class="note">Click a heading to sort.</p>
{page.table()}
<dl>{_definitions(_facts(report))}</dl>
</main>
<output id="detail" hidden></output>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _error(sums: ErrorSums, weighted: bool) -> float:
    return sums.weighted_rmse if weighted else sums.relative_rmse


def _percent(error: float) -> str:
    """Return a percentage with three digits, without an exponent."""
    value = 100 * error
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _role(name: str) -> str:
    """Return the role of a tensor, with its suffix unless that is `weight`."""
    parsed = TensorName.parse(name)
    return parsed.stem if parsed.suffix in ("weight", "") else parsed.local


class _Page:
    def __init__(self, report: StatsReport):
        self.report = report
        self.totals_of = {type.name: report.total(type) for type in report.types}
        self.means = {name: _error(sums, report.weighted) for name, sums in self.totals_of.items()}
        self.n_bytes = sum(stats.tensor.n_bytes for stats in report.tensors)
        distances = sorted(
            abs(place)
            for stats in report.tensors
            for sums in stats.errors.values()
            if (place := self._distance(sums)) is not None
        )
        # a few extreme tensors should not use up the range of colours
        self.reach = max(
            _SMALLEST_REACH, distances[int(0.98 * (len(distances) - 1))] if distances else 0.0
        )

    def _distance(self, sums: ErrorSums) -> float | None:
        """Return log2(error / mean of the type), None for an error or a mean of 0."""
        error, mean = _error(sums, self.report.weighted), self.means[sums.type.name]
        return math.log2(error / mean) if error > 0 and mean > 0 else None

    def share(self, stats: TensorStats) -> float:
        return stats.tensor.n_bytes / max(1, self.n_bytes)

    def totals(self) -> str:
        cards = []
        for type in self.report.types:
            sums = self.totals_of[type.name]
            count = sum(type.name in stats.errors for stats in self.report.tensors)
            if not count:
                text = "<b>–</b><small>fits no tensor</small>"
            else:
                fits = "" if count == len(self.report.tensors) else f", {count} tensors"
                text = (
                    f"<b>{_percent(self.means[type.name])}&nbsp;%</b>"
                    f"<small>{sums.bits_per_weight:.4g} bits per weight{fits}</small>"
                )
            cards.append(f'<div class="card"><span>{escape(type.name)}</span>{text}</div>')
        return f'<div class="cards" role="group" aria-label="All tensors">{"".join(cards)}</div>'

    def legend(self) -> str:
        factor = 2**self.reach
        ticks = (f"{1 / factor:.2f} ×", "the type's mean", f"{factor:.2f} ×")
        return (
            '<div class="legend" aria-hidden="true"><div class="bar"></div><div class="ticks">'
            + "".join(f"<span>{tick}</span>" for tick in ticks)
            + "</div></div>"
        )

    def panels(self) -> str:
        types = [type for type in self.report.types if self.totals_of[type.name].n_elements]
        choice = ""
        if len(types) > _MOST_PANELS:
            options = "".join(
                f'<option value="panel-{n}">{escape(type.name)}</option>'
                for n, type in enumerate(types)
            )
            choice = (
                f'<p class="choice"><label>Type <select id="type">{options}</select></label></p>'
            )
        panels = "".join(self._panel(n, type) for n, type in enumerate(types))
        return f'{choice}<div class="panels">{panels}</div>'

    def _panel(self, number: int, type: GGMLType) -> str:
        found = [stats for stats in self.report.tensors if type.name in stats.errors]
        return (
            f'<section class="panel" id="panel-{number}"><h2>{escape(type.name)}</h2>'
            f"{self._map(type, found)}{self._worst(type, found)}</section>"
        )

    def _map(self, type: GGMLType, found: Sequence[TensorStats]) -> str:
        """Return the table of layers by roles."""
        cells: dict[tuple[int, str], list[TensorStats]] = {}
        for stats in found:
            layer = TensorName.parse(stats.tensor.name).layer
            if layer is not None:
                cells.setdefault((layer, _role(stats.tensor.name)), []).append(stats)
        if not cells:
            return ""
        layers = sorted({layer for layer, _ in cells})
        roles = list(dict.fromkeys(role for _, role in cells))
        heads = "".join(
            f'<th scope="col"><span>{escape(printable(role, 40))}</span></th>' for role in roles
        )
        rows = []
        for layer in layers:
            row = "".join(
                self._cell(type, cells.get((layer, role), ()), small=True) for role in roles
            )
            rows.append(f'<tr><th scope="row">{layer}</th>{row}</tr>')
        return (
            '<div class="wide" role="group" aria-label="Map of layers by roles" tabindex="0">'
            f'<table class="map"><thead><tr><th scope="col">layer</th>{heads}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _worst(self, type: GGMLType, found: Sequence[TensorStats]) -> str:
        def error(stats: TensorStats) -> float:
            return _error(stats.errors[type.name], self.report.weighted)

        lines = []
        for stats in sorted(found, key=error, reverse=True)[:_WORST]:
            mean = self.means[type.name]
            times = f"{error(stats) / mean:.2f} × the mean, " if mean > 0 else ""
            lines.append(
                f"<li><b>{escape(printable(stats.tensor.name, 80))}</b> {_percent(error(stats))}"
                f"&nbsp;% <small>{times}{100 * self.share(stats):.2g} % of the file</small></li>"
            )
        return f'<h3>Largest errors</h3><ol class="worst">{"".join(lines)}</ol>'

    def table(self) -> str:
        heads = "".join(
            f'<th scope="col" aria-sort="none"><button>{escape(type.name)}'
            f"<small>{type.bits_per_weight:.4g} bits</small></button></th>"
            for type in self.report.types
        )
        rows = "".join(self._row(number, stats) for number, stats in enumerate(self.report.tensors))
        return (
            '<div class="wide" role="group" aria-label="All tensors" tabindex="0">'
            '<table class="all"><thead><tr>'
            '<th scope="col" aria-sort="none"><button>Tensor</button></th>'
            '<th scope="col" aria-sort="none"><button>Share'
            f"<small>of the file</small></button></th>{heads}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )

    def _row(self, number: int, stats: TensorStats) -> str:
        cells = "".join(
            self._cell(type, (stats,) if type.name in stats.errors else ())
            for type in self.report.types
        )
        share = self.share(stats)
        shape = " × ".join(map(str, stats.tensor.shape))
        return (
            f'<tr><th scope="row" data-sort="{number}" title="{shape}, {stats.tensor.type}">'
            f"{_breakable(printable(stats.tensor.name, 120))}</th>"
            f'<td class="plain" data-sort="{share:.6g}">{100 * share:.2f}&nbsp;%</td>{cells}</tr>'
        )

    def _cell(self, type: GGMLType, tensors: Sequence[TensorStats], small: bool = False) -> str:
        """Return a coloured cell. Several tensors, such as the experts of a layer, count as one."""
        if not tensors:
            said = "" if small else ' title="the rows cannot have this type"'
            return f'<td class="none" data-sort="-1"{said}>{"" if small else "–"}</td>'
        sums = sum((stats.errors[type.name] for stats in tensors), ErrorSums(type))
        error, distance = _error(sums, self.report.weighted), self._distance(sums)
        place = 0.0 if distance is None else min(1.0, max(-1.0, distance / self.reach))
        side = "over" if place > 0 else "under"
        deep = " deep" if abs(place) > 0.6 else ""
        return (
            f'<td class="{side}{deep}" style="--p:{100 * abs(place):.0f}%" data-sort="{error:.6g}"'
            f' title="{escape(self._details(sums, tensors))}">{_percent(error)}</td>'
        )

    def _details(self, sums: ErrorSums, tensors: Sequence[TensorStats]) -> str:
        """Return all figures of a cell."""
        first = tensors[0]
        name = printable(first.tensor.name, 80)
        if len(tensors) > 1:
            name += f" and {len(tensors) - 1} more"
        shape = " × ".join(map(str, first.tensor.shape))
        share = 100 * sum(map(self.share, tensors))
        said = [
            f"{name} as {sums.type}: {_percent(sums.relative_rmse)} % relative error",
            *([f"{_percent(sums.weighted_rmse)} % weighted"] if first.weighted else []),
        ]
        mean = self.means[sums.type.name]
        if mean > 0:
            times = _error(sums, self.report.weighted) / mean
            said.append(f"{times:.3g} × the mean of {sums.type}")
        said += [
            f"rmse {sums.rmse:.3e}",
            f"largest error {sums.largest_error:.3e}",
            f"{sums.bits_per_weight:.4f} bits per weight",
            f"{shape} {first.tensor.type}",
            f"{share:.2f} % of the file",
        ]
        return ", ".join(said)


def _breakable(name: str) -> str:
    """Let a name of a tensor break at its dots."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _lead(report: StatsReport) -> str:
    what = (
        "columns are weighted by their importance"
        if report.weighted
        else "columns are not weighted, as no importance matrix was given"
    )
    rows = (
        f" About {report.sampled} evenly spaced rows of each tensor were measured."
        if report.sampled
        else ""
    )
    tensors = f"{len(report.tensors)} tensor{'' if len(report.tensors) == 1 else 's'}"
    types = f"{len(report.types)} type{'' if len(report.types) == 1 else 's'}"
    return (
        f"{tensors} quantized to {types} and decoded again. Numbers are the root mean square of the"
        f" error in percent of that of the weights; {what}.{rows} Colours compare a tensor with the"
        " mean of its type: below or above. Types are in the order of their bits per weight."
    )


def _definitions(facts: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
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

"""An SVG scatter chart with a logarithmic vertical axis. An inset enlarges the densest group of
marks.

Colours and fonts come from a style sheet by class name, so the chart follows the page into dark
mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .axes import SMALLEST, Axes, Box, one_two_five

WIDTH, HEIGHT = 820, 560
_CHARACTER, _LINE = 9.0, 17  # size of label text where it is largest
_CROWD = 32  # pixels within which marks crowd


@dataclass(frozen=True)
class Point:
    """One labelled mark. `series` selects its shape and colour. A `ring` is drawn around a mark
    instead of on top of it.
    """

    label: str
    x: float
    y: float
    series: int = 0
    ring: bool = False


@dataclass(frozen=True)
class Canvas:
    """The size of a chart, where its axes are, and how wide a character of a label is at most. A
    `narrow` one, for telephones, has no inset, and its legend below.
    """

    width: int
    height: int
    plot: Box
    character: float
    narrow: bool = False

    def id(self, name: str) -> str:
        """Return an id that is unique on a page with both widths."""
        return f"narrow-{name}" if self.narrow else name


_PLOT = Box(80, 20, WIDTH - 20, HEIGHT - 60)
_BROAD = Canvas(WIDTH, HEIGHT, _PLOT, _CHARACTER)
_NARROW = Canvas(400, 440, Box(56, 14, 390, 310), 8.0, narrow=True)
_PANEL = Box(96, 318, 416, HEIGHT - 74)  # holds the inset and its tick labels
_INSET = Box(_PANEL.left + 50, _PANEL.top + 12, _PANEL.right - 14, _PANEL.bottom - 28)


def scatter(
    points: Sequence[Point],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    series: Sequence[str],
    narrow: bool = False,
) -> str:
    """Return an `<svg>` element with grid, axes, one `<g class="mark">` per point, a legend of the
    `series` that occur, and the lower left frontier. narrow: for pages of 420 pixels.
    """
    canvas = _NARROW if narrow else _BROAD
    xs, ys = [p.x for p in points], [max(p.y, SMALLEST) for p in points]
    axes = Axes(
        canvas.plot,
        math.floor(min(xs) - 0.2),
        math.ceil(max(xs) + 0.2),
        one_two_five(min(ys) * 0.8, up=False),
        one_two_five(max(ys) * 1.3, up=True),
    )
    frontier = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in _frontier(points))
    crowd = [] if narrow else _crowd(axes, points)
    named, described = canvas.id("chart-title"), canvas.id("chart-description")
    parts = [
        (
            f'<svg viewBox="0 0 {canvas.width} {canvas.height}" role="img"'
            f' aria-labelledby="{named} {described}">'
        ),
        f'<title id="{named}">{escape(title)}</title>',
        f'<desc id="{described}">{escape(description)}</desc>',
        *_grid(axes),
        *_axis_labels(canvas, x_label, y_label),
        f'<polyline class="frontier" points="{frontier}"/>',
    ]
    if crowd:
        parts += _inset(axes, crowd)
    parts += _marks(axes, points, "mark", canvas.character, unlabelled=crowd)
    used = sorted({point.series for point in points})
    return "\n".join([*parts, *_legend(canvas, [(i, series[i]) for i in used]), "</svg>"])


def standalone(svg: str, css: str) -> str:
    """Return an `<svg>` element of `scatter` as a file: with namespace, background and style
    sheet.
    """
    head, body = svg.split(">", 1)
    background = f'<rect class="background" width="{WIDTH}" height="{HEIGHT}" rx="10"/>'
    extra = (
        "svg { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif;"
        " max-width: 100%; height: auto; }\n"
        "@media (max-width: 40rem) { svg { font-size: 15px; } }\n"
        ".background { fill: var(--card); }\n"
    )
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">\n'
        f"<style>{css}{extra}</style>\n{background}{body}\n"
    )


def _crowd(axes: Axes, points: Sequence[Point]) -> list[Point]:
    """Return the largest group of points near one of them, or no points if the group has fewer than
    three or the inset would cover a mark.
    """
    if any(axes.around(p.x, p.y).meets(_PANEL.grown(10)) for p in points):
        return []
    near = [
        [
            q
            for q in points
            if math.hypot(axes.x(p.x) - axes.x(q.x), axes.y(p.y) - axes.y(q.y)) < _CROWD
        ]
        for p in points
    ]
    largest = max(near, key=len)
    return largest if len(largest) > 2 else []


def _inset(main: Axes, crowd: Sequence[Point]) -> list[str]:
    """Draw the crowd enlarged, with lines to its place in the main chart."""
    boxes = [main.around(p.x, p.y) for p in crowd]
    place = Box(
        min(b.left for b in boxes),
        min(b.top for b in boxes),
        max(b.right for b in boxes),
        max(b.bottom for b in boxes),
    ).grown(3)
    xs, ys = [p.x for p in crowd], [max(p.y, SMALLEST) for p in crowd]
    width, ratio = max(max(xs) - min(xs), 0.05), max(ys) / min(ys)
    axes = Axes(
        _INSET,
        min(xs) - 0.75 * width,
        max(xs) + 1.1 * width,
        min(ys) / ratio**0.35 / 1.03,
        max(ys) * ratio**0.3 * 1.03,
    )
    ties = [
        (place.left, place.bottom, _PANEL.left, _PANEL.top),
        (place.right, place.bottom, _PANEL.right, _PANEL.top),
    ]
    return [
        "".join(
            f'<line class="tie" x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}"/>'
            for a, b, c, d in ties
        ),
        place.svg("tie"),
        _PANEL.svg("panel"),
        *_grid(axes),
        *_marks(axes, crowd, "enlarged", _CHARACTER),
    ]


def _grid(axes: Axes) -> list[str]:
    frame = axes.frame
    parts = ['<g class="grid" aria-hidden="true">']
    for tick in axes.y_ticks:
        y = axes.y(tick)
        weight = ' class="strong"' if f"{tick:e}".startswith("1.0") else ""
        parts.append(
            f'<line{weight} x1="{frame.left}" y1="{y:.1f}" x2="{frame.right}" y2="{y:.1f}"/>'
            f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
        )
    for tick in axes.x_ticks:
        x = axes.x(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{frame.top}" x2="{x:.1f}" y2="{frame.bottom}"/>'
            f'<text x="{x:.1f}" y="{frame.bottom + 19}" text-anchor="middle">{tick:.3g}</text>'
        )
    return [*parts, "</g>"]


def _axis_labels(canvas: Canvas, x_label: str, y_label: str) -> list[str]:
    plot = canvas.plot
    across, down = (plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2
    left = 13 if canvas.narrow else 18
    return [
        (
            f'<text class="axis" x="{across}" y="{plot.bottom + 48}"'
            f' text-anchor="middle">{escape(x_label)}</text>'
        ),
        (
            f'<text class="axis" x="{left}" y="{down}" text-anchor="middle"'
            f' transform="rotate(-90 {left} {down})">{escape(y_label)}</text>'
        ),
    ]


def _marks(
    axes: Axes,
    points: Sequence[Point],
    kind: str,
    character: float,
    unlabelled: Sequence[Point] = (),
) -> list[str]:
    """Return a group of class `kind` per point: shape, label, and a title that browsers show as a
    tooltip. Rings come last, on top.
    """
    labels = _labels(axes, [p for p in points if p not in unlabelled], points, character)
    parts = []
    for point in sorted(points, key=lambda p: p.ring):
        name = escape(point.label)
        parts.append(
            f'<g class="{kind} series{point.series}" data-label="{name}">'
            f"<title>{name}: {point.x:.2f} bits per weight, {point.y:.3g}</title>"
            f"{_shape(point, axes.x(point.x), axes.y(point.y))}{labels.get(point, '')}</g>"
        )
    return parts


def _shape(point: Point, x: float, y: float) -> str:
    if point.ring:
        return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9.5"/>'
    if point.series == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
    return f'<path d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"/>'


def _labels(
    axes: Axes, points: Sequence[Point], all_points: Sequence[Point], character: float
) -> dict[Point, str]:
    """Return a text for each of `points`, at the first place next to its mark that nothing
    covers.
    """
    taken = [axes.around(p.x, p.y) for p in all_points]
    texts = {}
    for point in points:
        x, y, width = axes.x(point.x), axes.y(point.y), character * len(point.label)
        for dx, dy in ((14, 0), (-14, 0), (12, 15), (12, -15), (-12, 15), (-12, -15)):
            left = x + dx if dx > 0 else x + dx - width
            box = Box(left, y + dy - _LINE / 2, left + width, y + dy + _LINE / 2)
            if axes.frame.holds(box) and not any(box.meets(other) for other in taken):
                break
        taken.append(box)
        anchor = "start" if dx > 0 else "end"
        texts[point] = (
            f'<text x="{x + dx:.1f}" y="{y + dy + 4.5:.1f}"'
            f' text-anchor="{anchor}">{escape(point.label)}</text>'
        )
    return texts


def _legend(canvas: Canvas, series: Sequence[tuple[int, str]]) -> list[str]:
    """Return the names of series (number, name) and of the frontier, on a panel or below."""
    plot, parts = canvas.plot, ['<g class="legend">']
    if canvas.narrow:
        left, top = plot.left + 10, plot.bottom + 76
    else:
        left, top = plot.right - 212, plot.top + 34
        box = Box(left - 20, top - 20, plot.right - 12, top + 22 * len(series) + 18)
        parts.append(box.svg("panel"))
    for row, (index, name) in enumerate(series):
        y = top + 22 * row
        shape = _shape(Point(name, 0, 0, index), left, y)
        parts.append(
            f'<g class="series{index}">{shape}<text x="{left + 16}"'
            f' y="{y + 4.5}">{escape(name)}</text></g>'
        )
    y = top + 22 * len(series)
    return [
        *parts,
        (
            f'<line class="frontier" x1="{left - 9}" y1="{y}" x2="{left + 9}" y2="{y}"/>'
            f'<text x="{left + 16}" y="{y + 4.5}">least loss at its size</text></g>'
        ),
    ]


def _frontier(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both directions, from left to right."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best

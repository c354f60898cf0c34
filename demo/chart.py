"""An SVG scatter chart with a logarithmic vertical axis. A crowd of marks is shown once more,
enlarged, in an inset.

Colours and fonts come from the page's style sheet by class name, so the chart follows the page into
dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 820, 560
_CHARACTER, _LINE = 7.8, 15  # size of label text, generously
_CROWD = 32  # pixels within which marks crowd
_SMALLEST = 1e-7  # what a value of zero is drawn as


@dataclass(frozen=True)
class Point:
    """One labelled mark. `series` picks its shape and colour, a `ring` is drawn around what another
    mark covers.
    """

    label: str
    x: float
    y: float
    series: int = 0
    ring: bool = False


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: _Box) -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def grown(self, margin: float) -> _Box:
        return _Box(
            self.left - margin, self.top - margin, self.right + margin, self.bottom + margin
        )

    def svg(self, kind: str) -> str:
        return (
            f'<rect class="{kind}" x="{self.left:.1f}" y="{self.top:.1f}"'
            f' width="{self.right - self.left:.1f}" height="{self.bottom - self.top:.1f}" rx="4"/>'
        )


_PLOT = _Box(80, 20, WIDTH - 20, HEIGHT - 60)
_PANEL = _Box(96, 318, 416, HEIGHT - 74)  # holds the inset and its tick labels
_INSET = _Box(_PANEL.left + 50, _PANEL.top + 12, _PANEL.right - 14, _PANEL.bottom - 28)


@dataclass(frozen=True)
class _Axes:
    """Values to pixels inside `frame`."""

    frame: _Box
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return self.frame.left + (value - self.x_low) / (self.x_high - self.x_low) * (
            self.frame.right - self.frame.left
        )

    def y(self, value: float) -> float:
        share = math.log(max(value, _SMALLEST) / self.y_low) / math.log(self.y_high / self.y_low)
        return self.frame.bottom - share * (self.frame.bottom - self.frame.top)

    def mark(self, point: Point) -> _Box:
        return _Box(self.x(point.x), self.y(point.y), self.x(point.x), self.y(point.y)).grown(9)

    @property
    def x_ticks(self) -> list[float]:
        step = _one_two_five((self.x_high - self.x_low) / 8, up=True)
        return [
            i * step
            for i in range(
                math.ceil(self.x_low / step - 1e-6), math.floor(self.x_high / step + 1e-6) + 1
            )
        ]

    @property
    def y_ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.y_low)), math.ceil(math.log10(self.y_high)) + 1)
        digits = (1, 2, 5) if self.y_high > 5 * self.y_low else range(1, 10)
        return [
            d * 10.0**p
            for p in powers
            for d in digits
            if self.y_low * 0.999 <= d * 10.0**p <= self.y_high * 1.001
        ]


def _one_two_five(value: float, up: bool) -> float:
    """The nearest of 1, 2, 5 times a power of ten that is not below (`up`) or not above `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [digit * power for digit in (1, 2, 5, 10)]
    return next(s for s in steps if s >= value) if up else max(s for s in steps if s <= value)


def scatter(
    points: Sequence[Point],
    *,
    title: str,
    description: str,
    x_label: str,
    y_label: str,
    series: Sequence[str],
) -> str:
    """An `<svg>` element with one `<g class="mark">` per point, grid, axes, a legend of the
    `series` and the lower left frontier.
    """
    xs, ys = [p.x for p in points], [max(p.y, _SMALLEST) for p in points]
    axes = _Axes(
        _PLOT,
        math.floor(min(xs) - 0.2),
        math.ceil(max(xs) + 0.2),
        _one_two_five(min(ys) * 0.8, up=False),
        _one_two_five(max(ys) * 1.3, up=True),
    )
    frontier = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in _frontier(points))
    crowd = _crowd(axes, points)
    parts = [
        (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="chart-title'
            ' chart-description">'
        ),
        f'<title id="chart-title">{escape(title)}</title>',
        f'<desc id="chart-description">{escape(description)}</desc>',
        *_grid(axes),
        *_axis_labels(x_label, y_label),
        f'<polyline class="frontier" points="{frontier}"/>',
    ]
    if crowd:
        parts += _inset(axes, crowd)
    parts += _marks(axes, points, "mark", unlabelled=crowd)
    return "\n".join([*parts, *_legend(series), "</svg>"])


def _crowd(axes: _Axes, points: Sequence[Point]) -> list[Point]:
    """The largest group of points near one of them, if there are three or more and the inset would
    cover nothing.
    """
    if any(axes.mark(p).meets(_PANEL.grown(10)) for p in points):
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


def _inset(main: _Axes, crowd: Sequence[Point]) -> list[str]:
    """The crowd enlarged, tied to its place in the main chart."""
    boxes = [main.mark(p) for p in crowd]
    place = _Box(
        min(b.left for b in boxes),
        min(b.top for b in boxes),
        max(b.right for b in boxes),
        max(b.bottom for b in boxes),
    ).grown(3)
    xs, ys = [p.x for p in crowd], [max(p.y, _SMALLEST) for p in crowd]
    width, ratio = max(max(xs) - min(xs), 0.05), max(ys) / min(ys)
    axes = _Axes(
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
        *_marks(axes, crowd, "enlarged"),
    ]


def _grid(axes: _Axes) -> list[str]:
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


def _axis_labels(x_label: str, y_label: str) -> list[str]:
    across, down = (_PLOT.left + _PLOT.right) / 2, (_PLOT.top + _PLOT.bottom) / 2
    return [
        (
            f'<text class="axis" x="{across}" y="{HEIGHT - 12}"'
            f' text-anchor="middle">{escape(x_label)}</text>'
        ),
        (
            f'<text class="axis" x="18" y="{down}" text-anchor="middle" transform="rotate(-90 18'
            f' {down})">{escape(y_label)}</text>'
        ),
    ]


def _marks(
    axes: _Axes, points: Sequence[Point], kind: str, unlabelled: Sequence[Point] = ()
) -> list[str]:
    """A group of class `kind` per point: shape, label, and a title that is shown as a tooltip.
    Rings come last, on top.
    """
    labels = _labels(axes, [p for p in points if p not in unlabelled], points)
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


def _labels(axes: _Axes, points: Sequence[Point], all_points: Sequence[Point]) -> dict[Point, str]:
    """A text for each of `points`, at the first place beside its mark that nothing else covers."""
    taken = [axes.mark(p) for p in all_points]
    texts = {}
    for point in points:
        x, y, width = axes.x(point.x), axes.y(point.y), _CHARACTER * len(point.label)
        for dx, dy in ((14, 0), (-14, 0), (12, 15), (12, -15), (-12, 15), (-12, -15)):
            left = x + dx if dx > 0 else x + dx - width
            box = _Box(left, y + dy - _LINE / 2, left + width, y + dy + _LINE / 2)
            if axes.frame.holds(box) and not any(box.meets(other) for other in taken):
                break
        taken.append(box)
        anchor = "start" if dx > 0 else "end"
        texts[point] = (
            f'<text x="{x + dx:.1f}" y="{y + dy + 4.5:.1f}"'
            f' text-anchor="{anchor}">{escape(point.label)}</text>'
        )
    return texts


def _legend(series: Sequence[str]) -> list[str]:
    left, top = _PLOT.right - 200, _PLOT.top + 34
    parts = [
        '<g class="legend">',
        _Box(left - 20, top - 20, _PLOT.right - 12, top + 22 * len(series) + 18).svg("panel"),
    ]
    for index, name in enumerate(series):
        y = top + 22 * index
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
    """The points that no other beats in both directions, from left to right."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best

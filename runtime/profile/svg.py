"""Passes as a timeline: a row per layer, a box per kernel, times counted from where the layer
begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .trace import Pass, Span

WIDTH, LEFT, RIGHT, ROW, GAP = 1200, 110, 90, 18, 4
_LETTER = 5.8  # of 10 px text, on average
_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#ff9da7",
    "#9c755f",
    "#6b8e23",
    "#d37295",
    "#86bcb6",
    "#8cd17d",
    "#fabfd2",
    "#a0cbe8",
    "#bab0ac",
)


def timeline(panels: Sequence[tuple[str, Pass]]) -> str:
    """An SVG document with one panel for each (title, pass). Boxes have titles (shown on hovering)
    with name, time and GB/s.
    """
    names: dict[str, float] = {}
    for _, p in panels:
        for span in p.spans:
            names[span.name] = names.get(span.name, 0.0) + span.own
    order = sorted(names, key=lambda name: -names[name])
    colour = {name: _COLOURS[min(i, len(_COLOURS) - 1)] for i, name in enumerate(order)}
    body, y = [], 12
    for title, p in panels:
        part, y = _panel(title, p, colour, y)
        body += part
    part, y = _legend(order[: len(_COLOURS)], colour, y + 10)
    body += part
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" viewBox="0 0'
        f' {WIDTH} {y + 10}" font-family="Helvetica, Arial, sans-serif" font-size="10">'
    )
    return (
        "\n".join(
            [head, f'<rect width="{WIDTH}" height="{y + 10}" fill="#ffffff"/>', *body, "</svg>"]
        )
        + "\n"
    )


def rows_of(p: Pass) -> list[tuple[str, list[Span]]]:
    """The spans of a pass cut where the layer changes. What has no layer belongs to the row before
    it, or to the first.
    """
    rows: list[tuple[str, list[Span]]] = []
    waiting: list[Span] = []
    for span in sorted(p.spans, key=lambda s: (s.start, s.depth)):
        if not span.layer:
            (rows[-1][1] if rows else waiting).append(span)
        elif rows and rows[-1][0] == span.layer:
            rows[-1][1].append(span)
        else:
            rows.append((span.layer, [*waiting, span]))
            waiting = []
    return rows or ([("all", waiting)] if waiting else [])


def _panel(title: str, p: Pass, colour: dict[str, str], y: float) -> tuple[list[str], float]:
    rows = rows_of(p)
    longest = max((max(s.end for s in spans) - spans[0].start for _, spans in rows), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    out = [f'<text x="8" y="{y + 12}" font-size="14" font-weight="bold">{escape(title)}</text>']
    top = y + 36
    bottom = top + len(rows) * (ROW + GAP)
    step = _tick(longest)
    for k in range(math.floor(longest / step) + 1):
        x = LEFT + k * step * scale
        out.append(
            f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
        )
        out.append(
            f'<text x="{x:.1f}" y="{top - 8}" text-anchor="middle"'
            f' fill="#555555">{_time(k * step)}</text>'
        )
    for i, (layer, spans) in enumerate(rows):
        at, begin = top + i * (ROW + GAP), spans[0].start
        out.append(
            f'<text x="{LEFT - 6}" y="{at + 13}" text-anchor="end"'
            f' font-size="11">{escape(layer)}</text>'
        )
        for span in spans:
            out += _box(
                span,
                LEFT + (span.start - begin) * scale,
                at,
                span.duration * scale,
                colour[span.name],
            )
        end = max(s.end for s in spans)
        out.append(
            f'<text x="{LEFT + (end - begin) * scale + 4:.1f}" y="{at + 13}"'
            f' fill="#555555">{_time(end - begin)}</text>'
        )
    return out, bottom + 14


def _box(span: Span, x: float, y: float, width: float, colour: str) -> list[str]:
    inset = min(2 * span.depth, ROW // 2)  # ranges within ranges are drawn into them
    about = (
        f"{span.name}"
        + (f" ({span.module})" if span.module and span.module != span.name else "")
        + f": {span.duration:.2f} µs"
    )
    if span.n_bytes:
        about += f", {span.n_bytes / span.duration / 1e3:.0f} GB/s" if span.duration else ""
    out = [
        f'<rect x="{x:.2f}" y="{y + inset}" width="{max(width, 0.3):.2f}" height="{ROW - inset}"'
        f' fill="{colour}" stroke="#ffffff"'
        f' stroke-width="0.3"><title>{escape(about)}</title></rect>'
    ]
    letters = int((width - 6) / _LETTER)
    if letters >= 3 and span.own > 0.9 * span.duration:  # else other boxes cover the text
        text = span.name if len(span.name) <= letters else span.name[: letters - 1] + "…"
        out.append(
            f'<text x="{x + 3:.1f}" y="{y + ROW - 5}" fill="#000000"'
            f' pointer-events="none">{escape(text)}</text>'
        )
    return out


def _legend(names: Sequence[str], colour: dict[str, str], y: float) -> tuple[list[str], float]:
    out, x = [], 8.0
    for name in names:
        wide = 24 + len(name) * _LETTER
        if x > 8 and x + wide > WIDTH - 8:
            x, y = 8.0, y + 16
        out.append(f'<rect x="{x:.1f}" y="{y}" width="10" height="10" fill="{colour[name]}"/>')
        out.append(f'<text x="{x + 14:.1f}" y="{y + 9}">{escape(name)}</text>')
        x += wide
    return out, y + 16


def _tick(longest: float) -> float:
    """A round number of microseconds, for five to twelve ticks."""
    power = 10 ** math.floor(math.log10(max(longest, 1e-3) / 5))
    return next(power * k for k in (1, 2, 5, 10) if longest / (power * k) <= 12)


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.4g} ms" if microseconds >= 1000 else f"{microseconds:.3g} µs"

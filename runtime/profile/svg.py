"""Passes as a timeline: a row per layer, a box per kernel, times counted from where the layer
begins.

All positions across are percentages and all letters have a fixed size, so that the drawing fits a
telephone as well as a desk. What is written into boxes and between ticks depends on the width: the
style sheet shows one of two choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from textwrap import wrap

from .trace import Pass, Span

LEFT, ACROSS = 2.0, 96.0  # per cent of the width
NARROW, WIDE = 360, 1100  # px: the least width, and from where on there is space for more
_LABEL, _ROW, _GAP = 15, 18, 5  # px: heights
_LETTER, _TITLE_LETTER = 5.8, 7.4  # px: widths on average, of 10 px and of bold 14 px
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
_STYLE = f"""
:root {{ --page: #ffffff; --ink: #1d2125; --soft: #59626b; --line: #dfe1e4; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171a; --ink: #e7e9eb; --soft: #a3acb5; --line: #30363c; }}
}}
svg:root {{ background: var(--page); }}
.page {{ fill: var(--page); }}
text {{ font: 10px Helvetica, Arial, sans-serif; fill: var(--ink); }}
.title {{ font-size: 14px; font-weight: bold; }}
.layer {{ font-size: 11px; }}
.soft {{ fill: var(--soft); }}
.tick {{ stroke: var(--line); }}
.box {{ stroke: var(--page); stroke-width: .3; }}
.name {{ fill: #000000; pointer-events: none; }}
.narrow {{ display: none; }}
@media (max-width: {WIDE - 1}px) {{
  .wide {{ display: none; }}
  .narrow {{ display: inline; }}
}}
"""


def timeline(panels: Sequence[tuple[str, Pass]]) -> str:
    """Return an SVG document with one panel for each (title, pass). Boxes have titles (shown on
    hovering) with name, time and GB/s.
    """
    names: dict[str, float] = {}
    for _, p in panels:
        for span in p.spans:
            names[span.name] = names.get(span.name, 0.0) + span.own
    order = sorted(names, key=lambda name: -names[name])
    colour = {name: _COLOURS[min(i, len(_COLOURS) - 1)] for i, name in enumerate(order)}
    body, y = [], 12.0
    for title, p in panels:
        part, y = _panel(title, p, colour, y)
        body += part
    part, y = _legend(order, names, y + 6)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{y + 10:g}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="100%" height="{y + 10:g}"/>',
        *body,
        *part,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rows_of(p: Pass) -> list[tuple[str, list[Span]]]:
    """Return the spans of a pass cut where the layer changes. What has no layer belongs to the row
    before it, or to the first.
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
    scale = ACROSS / max(longest, 1e-9)
    out = []
    for line in wrap(title, int(NARROW * ACROSS / 100 / _TITLE_LETTER)) or [""]:
        out.append(f'<text class="title" x="{LEFT:g}%" y="{y + 12:g}">{escape(line)}</text>')
        y += 18
    top = y + 20
    bottom = top + len(rows) * (_LABEL + _ROW + _GAP)
    out += _ticks(longest, scale, top, bottom)
    for i, (layer, spans) in enumerate(rows):
        at, begin = top + i * (_LABEL + _ROW + _GAP), spans[0].start
        end = max(s.end for s in spans)
        out.append(
            f'<text class="layer" x="{LEFT:g}%" y="{at + 12:g}">{escape(layer)}'
            f'<tspan class="soft" dx="6">{_time(end - begin)}</tspan></text>'
        )
        for span in spans:
            out += _box(
                span,
                LEFT + (span.start - begin) * scale,
                at + _LABEL,
                span.duration * scale,
                colour[span.name],
            )
    return out, bottom + 14


def _ticks(longest: float, scale: float, top: float, bottom: float) -> list[str]:
    """Return lines at round times, and above them the times: every other one where it is narrow."""
    out, step = [], _tick(longest)
    for k in range(math.floor(longest / step) + 1):
        x = LEFT + k * step * scale
        anchor = "start" if not k else "end" if x > LEFT + 0.95 * ACROSS else "middle"
        kind = "soft wide" if k % 2 else "soft"
        out += [
            f'<line class="tick" x1="{x:.3f}%" y1="{top - 4:g}" x2="{x:.3f}%" y2="{bottom:g}"/>',
            f'<text class="{kind}" x="{x:.3f}%" y="{top - 8:g}"'
            f' text-anchor="{anchor}">{_time(k * step)}</text>',
        ]
    return out


def _box(span: Span, x: float, y: float, width: float, colour: str) -> list[str]:
    inset = min(2 * span.depth, _ROW // 2)  # ranges within ranges are drawn into them
    about = (
        f"{span.name}"
        + (f" ({span.module})" if span.module and span.module != span.name else "")
        + f": {span.duration:.2f} µs"
    )
    if span.n_bytes:
        about += f", {span.n_bytes / span.duration / 1e3:.0f} GB/s" if span.duration else ""
    out = [
        f'<rect class="box" x="{x:.3f}%" y="{y + inset:g}" width="{max(width, 0.03):.3f}%"'
        f' height="{_ROW - inset}" fill="{colour}"><title>{escape(about)}</title></rect>'
    ]
    if span.own <= 0.9 * span.duration:  # other boxes cover the text
        return out
    wide, narrow = (_fitting(span.name, width / 100 * px) for px in (WIDE, NARROW))
    texts = {wide: "name"} if wide == narrow else {wide: "name wide", narrow: "name narrow"}
    return out + [
        f'<text class="{kind}" x="{x:.3f}%" dx="3" y="{y + _ROW - 5:g}">{escape(text)}</text>'
        for text, kind in texts.items()
        if text
    ]


def _fitting(name: str, pixels: float) -> str:
    """Return the name, or its beginning, as it fits into a box; "" where hardly any of it does."""
    letters = int((pixels - 6) / _LETTER)
    if len(name) <= letters:
        return name
    return f"{name[: letters - 1]}…" if letters >= 3 else ""


def _legend(order: Sequence[str], seconds: dict[str, float], y: float) -> tuple[list[str], float]:
    """Return a line for every colour with its share of the time. The last colour is shared."""
    total = sum(seconds.values()) or 1.0
    shown = [(name, seconds[name]) for name in order]
    if len(order) > len(_COLOURS):
        rest = order[len(_COLOURS) - 1 :]
        others = (f"{len(rest)} others", sum(seconds[name] for name in rest))
        shown = [*shown[: len(_COLOURS) - 1], others]
    most = int((NARROW * ACROSS / 100 - 60) / _LETTER)
    out = []
    for (name, own), colour in zip(shown, _COLOURS, strict=False):
        short = name if len(name) <= most else f"{name[: most - 1]}…"
        out.append(f'<rect x="{LEFT:g}%" y="{y:g}" width="10" height="10" fill="{colour}"/>')
        out.append(
            f'<text x="{LEFT:g}%" dx="15" y="{y + 9:g}">{escape(short)}'
            f'<tspan class="soft" dx="6">{100 * own / total:.1f} %</tspan></text>'
        )
        y += 16
    return out, y


def _tick(longest: float) -> float:
    """Return a round number of microseconds, for five to twelve ticks."""
    power = 10 ** math.floor(math.log10(max(longest, 1e-3) / 5))
    return next(power * k for k in (1, 2, 5, 10) if longest / (power * k) <= 12)


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.4g} ms" if microseconds >= 1000 else f"{microseconds:.3g} µs"

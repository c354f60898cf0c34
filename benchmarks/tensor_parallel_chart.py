"""Draw what `tensor_parallel.py` has measured: speed against GPUs and against depth.

    python benchmarks/tensor_parallel_chart.py docs/benchmarks/tensor-parallel.svg out.jsonl

Against GPUs, filled marks are measured and hollow ones are what `plan-split --simulate` predicts.
Against depth, a solid line is the largest number of GPUs that was measured, a dashed one one GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import iqforge
from iqforge.proof.axes import Axes, Box, one_two_five
from iqforge.runtime.split_report import SplitReport

COLOURS = ("#0b6a93", "#b8450f", "#2e7d32", "#7b3fa0", "#a07800", "#5a6570", "#c2185b", "#00838f")
GPUS = (1, 2, 4, 8)
WIDTH, HEIGHT = 900, 760
# Prompts and steps against GPUs, then against depth.
_PANELS = [Box(left, top, left + 330, top + 270) for top in (50, 400) for left in (70, 480)]
_STYLE = (
    "svg { font: 12px system-ui, sans-serif; background: #ffffff; }\n"
    ".grid line { stroke: #dfe1e4; } .title { font-weight: 600; }\n"
    "polyline { fill: none; stroke-width: 1.8; }\n"
)


@dataclass(frozen=True)
class Line:
    """points: (x, y, whether y is measured)."""

    points: tuple[tuple[float, float, bool], ...]
    colour: str
    dashed: bool = False


def main() -> int:
    """Parse the command line and write the chart as SVG. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    parser.add_argument("lines", type=Path, nargs="+", help="files of `tensor_parallel.py measure`")
    args = parser.parse_args()
    found = [json.loads(line) for path in args.lines for line in path.read_text().splitlines()]
    args.out.write_text(drawn([line for line in found if line["mode"] != "layer"]))
    return 0


def drawn(found: Sequence[dict[str, Any]]) -> str:
    """Return the chart of lines of `measure`."""
    models = list(dict.fromkeys(line["model"] for line in found))
    colours = {model: COLOURS[i % len(COLOURS)] for i, model in enumerate(models)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img">\n<title>Speed against GPUs and against depth</title>\n'
        f"<style>{_STYLE}</style>",
        *_legend(colours),
    ]
    for number, (key, what) in enumerate((("prompt", "prompts"), ("step", "generation"))):
        lines = [against_gpus(found, model, key, colours[model]) for model in models]
        title = f"{what}, tokens/s, against GPUs"
        parts += _panel(_PANELS[number], title, lines, [math.log2(n) for n in GPUS], GPUS)
        lines = [line for m in models for line in against_depth(found, m, key, colours[m])]
        depths = sorted({line["depth"] for line in found})
        title = f"{what}, tokens/s, against tokens in the context"
        parts += _panel(_PANELS[2 + number], title, lines, depths, depths)
    return "\n".join([*parts, "</svg>\n"])


def against_gpus(found: Sequence[dict[str, Any]], model: str, key: str, colour: str) -> Line:
    """Return the speed of a model from an empty context: measured where it was, else predicted."""
    measured = {
        line["gpus"]: line[key] for line in found if line["model"] == model and not line["depth"]
    }
    points = []
    for n in GPUS:
        if n in measured:
            points.append((math.log2(n), measured[n], True))
        elif n > 1 or fits_one(model):
            points.append((math.log2(n), predicted(model, n, key), False))
    return Line(tuple(points), colour)


def fits_one(model: str) -> bool:
    """Return whether the weights fit an H200 with room for a cache."""
    return planned(model, 2).whole < 135e9


def predicted(model: str, n: int, key: str) -> float:
    """Return the predicted tokens per second on n GPUs, of prompts if `key` is `prompt`, else of
    steps.
    """
    report = planned(model, max(2, n))
    found = report.alone if n == 1 else report.prediction
    return found.prompt_rate if key == "prompt" else found.step_rate


@functools.cache
def planned(model: str, n: int) -> SplitReport:
    """Return the report of `plan_split` for random weights of `model` on n equal GPUs."""
    return iqforge.plan_split(model, (1,) * n, synthetic=True)


def against_depth(
    found: Sequence[dict[str, Any]], model: str, key: str, colour: str
) -> Iterable[Line]:
    """Return the measured speed of a model at several depths, on one GPU and on the most."""
    by_gpus: dict[int, dict[int, float]] = {}
    for line in found:
        if line["model"] == model:
            by_gpus.setdefault(line["gpus"], {})[line["depth"]] = line[key]
    for n, at in sorted(by_gpus.items()):
        if len(at) > 1 and n in (1, max(by_gpus)):
            points = tuple((float(depth), at[depth], True) for depth in sorted(at))
            yield Line(points, colour, dashed=n == 1)


def _panel(
    frame: Box, title: str, lines: Sequence[Line], ticks: Sequence[float], names: Sequence[int]
) -> list[str]:
    values = [y for line in lines for _, y, _ in line.points]
    if not values:
        return []
    low, high = one_two_five(min(values), up=False), one_two_five(max(values), up=True)
    axes = Axes(frame, min(ticks), max([*ticks, min(ticks) + 1]), low, high)
    parts = [f'<text class="title" x="{frame.left}" y="{frame.top - 14}">{escape(title)}</text>']
    parts.append('<g class="grid">')
    for tick in axes.y_ticks:
        y = axes.y(tick)
        parts.append(
            f'<line x1="{frame.left}" y1="{y:.1f}" x2="{frame.right}" y2="{y:.1f}"/>'
            f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>'
        )
    for tick, name in zip(ticks, names, strict=True):
        x = axes.x(tick)
        parts.append(
            f'<line x1="{x:.1f}" y1="{frame.top}" x2="{x:.1f}" y2="{frame.bottom}"/>'
            f'<text x="{x:.1f}" y="{frame.bottom + 18}" text-anchor="middle">{name:,}</text>'
        )
    parts.append("</g>")
    for line in lines:
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        at = [(axes.x(x), axes.y(y), known) for x, y, known in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
        parts.append(f'<polyline points="{path}" stroke="{line.colour}"{dash}/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" stroke="{line.colour}"'
            f' fill="{line.colour if known else "#ffffff"}"/>'
            for x, y, known in at
        ]
    return parts


def _legend(colours: dict[str, str]) -> list[str]:
    return [
        f'<text x="{70 + 205 * (i % 4)}" y="{718 + 20 * (i // 4)}" fill="{colour}">'
        f"{escape(model)}</text>"
        for i, (model, colour) in enumerate(colours.items())
    ]


if __name__ == "__main__":
    sys.exit(main())

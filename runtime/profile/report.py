"""Where the time of passes went, as tables: by kernel (on the CPU: by module) and by layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .trace import Pass, Span


@dataclass
class TimeRow:
    """Sums over the passes of one kind. Times in microseconds per pass; `n_bytes` per pass, of the
    spans of which it is known.
    """

    name: str
    count: float = 0.0
    total: float = 0.0
    n_bytes: float = 0.0
    timed_bytes: float = 0.0  # the time of those spans

    def add(self, span: Span, passes: int) -> None:
        """Add a span's own time, bytes and count. passes: that the sums are divided by."""
        self.count += 1 / passes
        self.total += span.own / passes
        if span.n_bytes:
            self.n_bytes += span.n_bytes / passes
            self.timed_bytes += span.duration / passes

    @property
    def gigabytes_per_second(self) -> float | None:
        """GB/s (10^9 bytes) of the spans whose bytes are known, or None."""
        return self.n_bytes / self.timed_bytes / 1e3 if self.timed_bytes else None


def rows_by(passes: Sequence[Pass], key) -> list[TimeRow]:
    """Rows in order of first appearance; `key(span)` is what spans are summed by."""
    rows: dict[str, TimeRow] = {}
    for p in passes:
        for span in p.spans:
            rows.setdefault(key(span), TimeRow(key(span))).add(span, len(passes))
    return list(rows.values())


def measured(passes: Sequence[Pass]) -> list[Pass]:
    """Those that count: replayed ones if there are any, and of others all but the first, which may
    have compiled something.
    """
    if any(p.replayed for p in passes):
        return [p for p in passes if p.replayed][1:] or [p for p in passes if p.replayed]
    return list(passes[1:]) or list(passes)


def typical(passes: Sequence[Pass]) -> Pass:
    """The measured pass whose duration is the median."""
    chosen = measured(passes)
    return sorted(chosen, key=lambda p: p.duration)[(len(chosen) - 1) // 2]


def tables(label: str, passes: Sequence[Pass], what: str) -> str:
    """Both tables of passes of one kind. what: `kernel` or `module`."""
    passes = measured(passes)
    duration, busy = (
        statistics.mean(p.duration for p in passes),
        statistics.mean(p.busy for p in passes),
    )
    lines = [
        (
            f"{label}: {len(passes)} pass{'es' * (len(passes) != 1)} of"
            f" {duration / 1e3:.3f} ms, of which {100 * busy / duration:.1f} % within {what}s"
        ),
        "",
    ]
    by_name = sorted(rows_by(passes, lambda span: span.name), key=lambda row: -row.total)
    lines += _table(what, by_name, duration)
    by_layer = rows_by(passes, lambda span: span.layer or "-")
    by_layer.sort(key=lambda row: row.name == "-")
    lines += ["", *_table("layer", by_layer, duration)]
    return "\n".join(lines)


def _table(what: str, rows: list[TimeRow], duration: float) -> list[str]:
    width = max([len(what), *(len(row.name) for row in rows)])
    lines = [
        f"| {what:{width}} |  count | total µs |  mean µs | share % |   GB/s |",
        f"| {'-' * width} | -----: | -------: | -------: | ------: | -----: |",
    ]
    for row in rows:
        speed = row.gigabytes_per_second
        shown = "" if speed is None else f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"
        lines.append(
            f"| {row.name:{width}} | {row.count:6.4g} | {row.total:8.1f} |"
            f" {row.total / row.count:8.2f} | {100 * row.total / duration:7.1f} | {shown:>6} |"
        )
    return lines

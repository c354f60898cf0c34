"""From a trace of torch.profiler to what each pass of a model spent its time on.

The trace is the JSON that `export_chrome_trace` writes: ranges of the CPU, calls of the CUDA
runtime or driver, and kernels, which know by number the call that launched them. Kernels of a
replayed CUDA graph all stem from one call; they get the layers that the same kernels had when they
were first launched one by one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace

from ..weights.ranges import PREFIX

PASS = "pass"  # in place of the layer: the range of a whole pass
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    """Something that ran from `start` for `duration` (microseconds since the pass began). `depth`:
    of ranges within ranges, on the CPU.
    """

    name: str
    layer: str
    start: float
    duration: float
    n_bytes: float = 0.0
    depth: int = 0
    own: float = 0.0  # duration without that of the spans within
    module: str = ""  # the innermost range that it was launched from

    @property
    def end(self) -> float:
        """When it ended, in microseconds since the pass began."""
        return self.start + self.duration


@dataclass
class Pass:
    """One prompt or one token: what ran, in order of time. `duration` in microseconds, as the CPU
    saw it.
    """

    label: str
    duration: float
    spans: list[Span] = field(default_factory=list)
    replayed: bool = False

    @property
    def busy(self) -> float:
        """Microseconds in which at least one span ran."""
        total, reached = 0.0, 0.0
        for span in self.spans:
            total += max(0.0, span.end - max(span.start, reached))
            reached = max(reached, span.end)
        return total


@dataclass(frozen=True)
class _Range:
    start: float
    end: float
    layer: str
    kind: str
    n_bytes: float
    depth: int


def passes_of(trace: dict) -> list[Pass]:
    """The passes of a trace in order. With kernels in it spans are kernels, otherwise the ranges
    themselves.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ranges = _ranges(
        [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)]
    )
    frames = [r for r in ranges if r.layer == PASS]
    kernels = sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"])
    if not kernels:
        return [
            _of_ranges(
                frame, [r for r in ranges if r is not frame and frame.start <= r.start < frame.end]
            )
            for frame in frames
        ]
    return _of_kernels(events, ranges, frames, kernels)


def _ranges(events: list[dict]) -> list[_Range]:
    found, stack = [], []
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        layer, kind, n_bytes = e["name"].removeprefix(PREFIX).split("|")
        while stack and stack[-1].end <= e["ts"]:
            stack.pop()
        if layer == PASS:
            stack.clear()
        elif not layer:  # an operation of the layer around it
            layer = next((r.layer for r in reversed(stack) if r.layer and r.layer != PASS), "")
        stack.append(_Range(e["ts"], e["ts"] + e["dur"], layer, kind, float(n_bytes), len(stack)))
        found.append(stack[-1])
    return found


def _of_ranges(frame: _Range, ranges: list[_Range]) -> Pass:
    spans = []
    for i, r in enumerate(ranges):
        within = 0.0
        for inner in ranges[i + 1 :]:
            if inner.start >= r.end:
                break
            within += inner.end - inner.start if inner.depth == r.depth + 1 else 0.0
        duration = r.end - r.start
        spans.append(
            Span(
                r.kind,
                r.layer,
                r.start - frame.start,
                duration,
                r.n_bytes,
                r.depth - 1,
                duration - within,
                r.kind,
            )
        )
    return Pass(frame.kind, frame.end - frame.start, spans)


def _of_kernels(
    events: list[dict], ranges: list[_Range], frames: list[_Range], kernels: list[dict]
) -> list[Pass]:
    calls = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    frame_starts, range_starts = [f.start for f in frames], [r.start for r in ranges]
    collected: list[list[tuple[Span, bool]]] = [[] for _ in frames]
    # a kernel may start early to wait for the one before it (programmatic launch): its time begins
    # where that one ends
    reached = 0.0
    given: dict[
        tuple[float, str, float], tuple[int, int]
    ] = {}  # a range's bytes go to its longest kernel: range -> its place
    for e in kernels:
        call = calls.get(e.get("args", {}).get("correlation"))
        at = call["ts"] if call else e["ts"]
        which = bisect_right(frame_starts, at) - 1
        if which < 0 or at >= frames[which].end:
            continue  # before, between or after passes
        inner = _innermost(ranges, range_starts, at)
        replayed = call is not None and "GraphLaunch" in call["name"]
        start, reached = (
            min(max(e["ts"], reached), e["ts"] + e["dur"]),
            max(reached, e["ts"] + e["dur"]),
        )
        duration = e["ts"] + e["dur"] - start
        span = Span(
            short_name(e["name"]),
            "" if inner is None else inner.layer,
            start,
            duration,
            own=duration,
            module="" if inner is None else inner.kind,
        )
        collected[which].append((span, replayed))
        if inner is not None and inner.n_bytes:
            key, place = (
                (inner.start, inner.kind, inner.n_bytes),
                (
                    which,
                    len(collected[which]) - 1,
                ),
            )
            held = given.get(key)
            if held is None or collected[held[0]][held[1]][0].duration < span.duration:
                given[key] = place
    for (_, _, n_bytes), (which, index) in given.items():
        span, replayed = collected[which][index]
        collected[which][index] = replace(span, n_bytes=n_bytes), replayed
    passes = []
    for frame, spans in zip(frames, collected, strict=True):
        begin = min([frame.start, *(span.start for span, _ in spans)])
        template = next((p for p in passes if p.label == frame.kind and not p.replayed), None)
        done = Pass(frame.kind, frame.end - frame.start, [], any(replayed for _, replayed in spans))
        done.spans = [
            replace(span, start=span.start - begin) for span in _with_layers(spans, template)
        ]
        passes.append(done)
    return passes


def _with_layers(spans: list[tuple[Span, bool]], template: Pass | None) -> list[Span]:
    """Kernels of a replayed graph with layer, module and bytes of the kernels of `template`, if
    they are the same ones in order. What the first pass of a sequence does once (scratch that is
    set to zero) is not in its graph.
    """
    replayed = [span for span, from_graph in spans if from_graph]
    names = {span.name for span in replayed}
    launched = (
        [
            span
            for span in template.spans
            if span.layer and span.layer != PASS and span.name in names
        ]
        if template
        else []
    )
    if not replayed or [s.name for s in replayed] != [s.name for s in launched]:
        return [span for span, _ in spans]
    known = iter(launched)
    return [
        (
            replace(
                span, layer=(like := next(known)).layer, module=like.module, n_bytes=like.n_bytes
            )
            if from_graph
            else span
        )
        for span, from_graph in spans
    ]


def _innermost(ranges: list[_Range], starts: list[float], at: float) -> _Range | None:
    """The range around a moment that began last."""
    for i in range(bisect_right(starts, at) - 1, -1, -1):
        if ranges[i].end > at:
            return None if ranges[i].layer == PASS else ranges[i]
        if ranges[i].layer == PASS:
            return None
    return None


def short_name(name: str) -> str:
    """A kernel's name without return type, arguments, namespaces and most template arguments, at
    most 60 characters.
    """
    name = re.sub(r"^(void|static|__global__)\s+", "", name)
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    head, angle, rest = name.partition("<")
    head = head.partition("(")[0].rpartition("::")[2].strip()
    if angle:
        inner = re.sub(r"(\w+::)+", "", rest.rpartition(">")[0])
        inner = re.sub(r"\([^()]*\)(?=[\w-])", "", inner)  # (int)4
        head += f"<{inner if len(inner) <= 36 else inner[:33] + '...'}>"
    return head if len(head) <= 60 else f"{head[:44]}...{head[-13:]}"

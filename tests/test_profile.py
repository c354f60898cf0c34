"""`iqforge profile`: tables and drawing on the CPU, and hand-made traces of a GPU."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
from iqforge.cli import main
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.commands.speed.profile import _how
from iqforge.runtime.model import Model, load_model
from iqforge.runtime.profile.profile import profile_model
from iqforge.runtime.profile.report import measured, rows_by, tables, typical
from iqforge.runtime.profile.svg import rows_of, timeline
from iqforge.runtime.profile.trace import PASS, Pass, Span, passes_of, short_name
from iqforge.runtime.weights.ranges import PREFIX, RangeName, opened, recording

from .shared import shared

SVG = "{http://www.w3.org/2000/svg}"


def named(layer, kind, start, duration, n_bytes=0):
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": str(RangeName(layer, kind, n_bytes)),
        "ts": start,
        "dur": duration,
    }


def call(name, correlation, at):
    return {
        "ph": "X",
        "cat": "cuda_driver",
        "name": name,
        "ts": at,
        "dur": 1.0,
        "args": {"correlation": correlation},
    }


def kernel(name, correlation, start, duration):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start,
        "dur": duration,
        "args": {"correlation": correlation, "stream": 7},
    }


def gpu_trace(last: str = "head"):
    """Return the trace of a pass whose kernels are launched one by one, and of two replays of a
    graph of the same kernels (or of others).
    """
    events = [
        {"ph": "M", "name": "process_name"},
        named(PASS, "tg", 100, 60),
        named("token_embd", "token_embd", 110, 4),
        call("cuLaunchKernelEx", 1, 111),
        kernel("rows(int)", 1, 113, 2),
        named("blk.0", "Attention", 120, 20),
        named("", "norm_matvec", 121, 5, 6000),
        call("cuLaunchKernelEx", 2, 122),
        kernel("void mv<4>(int)", 2, 124, 3),
        call("cuLaunchKernelEx", 3, 130),
        kernel("attend", 3, 131, 5),
        named("blk.1", "GatedFFN", 142, 6, 0),
        named("", "gate_up", 143, 4, 8000),
        call("cuLaunchKernelEx", 4, 144),
        kernel("void mv<4>(int)", 4, 146, 4),
        named("output", "output", 150, 5),
        call("cuLaunchKernelEx", 5, 151),
        kernel("head", 5, 153, 2),
    ]
    for i, at in enumerate((200, 300)):
        events += [named(PASS, "tg", at, 50), call("cudaMemcpyAsync", 10 + 10 * i, at + 1)]
        events += [
            {
                **kernel("Memcpy HtoD (Pageable -> Device)", 10 + 10 * i, at + 2, 1),
                "cat": "gpu_memcpy",
            }
        ]
        events += [call("cudaGraphLaunch", 11 + 10 * i, at + 3)]
        starts = ((5, 2), (7, 3), (12, 5), (20, 4), (25, 2 + i))
        names = ("rows(int)", "void mv<4>(int)", "attend", "void mv<4>(int)", last)
        events += [
            kernel(name, 11 + 10 * i, at + start, duration)
            for name, (start, duration) in zip(names, starts)
        ]
    return {"traceEvents": events[::-1]}


def test_kernels_get_their_layers_also_in_a_replayed_graph():
    first, *replays = passes_of(gpu_trace())
    expected = [
        ("rows", "token_embd"),
        ("mv<4>", "blk.0"),
        ("attend", "blk.0"),
        ("mv<4>", "blk.1"),
        ("head", "output"),
    ]
    assert [(s.name, s.layer) for s in first.spans] == expected and not first.replayed
    assert [s.n_bytes for s in first.spans] == [0, 6000, 0, 8000, 0] and first.spans[
        1
    ].module == "norm_matvec"
    for p in replays:
        assert (
            p.replayed and [(s.name, s.layer) for s in p.spans] == [("Memcpy HtoD", "")] + expected
        )
        assert (
            p.duration == 50
            and [s.start for s in p.spans] == [2, 5, 7, 12, 20, 25]
            and p.spans[2].n_bytes == 6000
        )
    assert [p.busy for p in replays] == [1 + 2 + 3 + 5 + 4 + 2, 1 + 2 + 3 + 5 + 4 + 3]


def test_a_kernel_that_starts_early_counts_from_where_the_one_before_ends():
    events = [
        named(PASS, "tg", 0, 100),
        *(call("cuLaunchKernelEx", i, 1 + i) for i in range(3)),
        kernel("a", 0, 10, 10),
        kernel("b", 1, 12, 20),
        kernel("c", 2, 13, 15),
    ]
    p = passes_of({"traceEvents": events})[0]
    assert [(s.name, s.start, s.own) for s in p.spans] == [
        ("a", 10, 10),
        ("b", 20, 12),
        ("c", 28, 0),
    ] and p.busy == 22


def test_other_kernels_in_a_graph_get_no_layers():
    assert [s.layer for s in passes_of(gpu_trace(last="tail"))[2].spans] == [""] * 6


def test_what_only_the_first_pass_does_leaves_the_layers_of_replays():
    """Scratch of a new sequence is allocated and set to zero within the range of its first
    layer.
    """
    trace = gpu_trace()
    trace["traceEvents"] += [
        call("cudaLaunchKernel", 8, 128),
        kernel("void FillFunctor<int>(int)", 8, 128, 1),
        call("cudaMemsetAsync", 9, 129),
        {**kernel("Memset (Device)", 9, 129, 1), "cat": "gpu_memset"},
    ]
    first, *replays = passes_of(trace)
    assert [s.layer for s in first.spans].count("blk.0") == 4
    assert all(
        [s.layer for s in p.spans] == ["", "token_embd", "blk.0", "blk.0", "blk.1", "output"]
        for p in replays
    )


def test_sums():
    passes = passes_of(gpu_trace())
    assert measured(passes) == passes[2:] and typical(passes) is passes[2]
    rows = {row.name: row for row in rows_by(passes[1:], lambda span: span.name)}
    assert (
        rows["mv<4>"].count == 2
        and rows["mv<4>"].total == 7
        and rows["mv<4>"].gigabytes_per_second == pytest.approx(14000 / 7 / 1e3)
    )
    assert rows["head"].total == 2.5 and rows["head"].gigabytes_per_second is None
    text = tables("tiny tg", passes, "kernel")
    assert "tiny tg: 1 pass of 0.050 ms, of which 36.0 % within kernels" in text
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")] == [
        "kernel",
        "-" * len("Memcpy HtoD"),
        "mv<4>",
        "attend",
        "head",
        "rows",
        "Memcpy HtoD",
        "layer",
        "-" * len("token_embd"),
        "token_embd",
        "blk.0",
        "blk.1",
        "output",
        "-",
    ]


def test_drawing():
    p = passes_of(gpu_trace())[1]
    assert [layer for layer, _ in rows_of(p)] == ["token_embd", "blk.0", "blk.1", "output"]
    root = ET.fromstring(timeline([("first & <second>", p), ("again", p)]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "first & <second>" in texts and texts.count("blk.0") == 2 and "attend" in texts
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[2] == "mv<4> (norm_matvec): 3.00 µs, 2 GB/s" and len(titles) == 12
    assert ET.fromstring(timeline([("empty", Pass("tg", 1.0))])) is not None


@pytest.mark.parametrize("width", [360, 420, 1099, 1100, 1280, 2000])
def test_a_drawing_fits_every_width(width):
    """No box and no text extends beyond the page, and times above the ticks do not overlap."""
    spans = [
        Span(f"{'kernel_' * (i % 12)}{i}", f"blk.{i // 8}", 37.0 * i, 5.0 * (i % 8), own=5.0)
        for i in range(160)
    ]
    title = "a/rather/long/path/to/" * 5 + "model.gguf pp512, 12.345\u00a0ms"
    root = ET.fromstring(timeline([(title, Pass("pp512", 6000.0, spans))]))
    assert root.get("width") == "100%" and root.get("viewBox") is None

    def at(element, name):
        value = element.get(name, "0")
        return float(value[:-1]) / 100 * width if value.endswith("%") else float(value)

    hidden = "narrow" if width >= 1100 else "wide"
    for box in root.iter(f"{SVG}rect"):
        assert at(box, "x") >= 0 and at(box, "x") + at(box, "width") <= width
    times = []
    for text in root.iter(f"{SVG}text"):
        classes = (text.get("class") or "").split()
        if hidden in classes:
            continue
        letter = 7.2 if "title" in classes else 5.5
        long = letter * len("".join(text.itertext()))
        left = at(text, "x") - {"end": long, "middle": long / 2}.get(text.get("text-anchor"), 0)
        assert left >= 0 and left + at(text, "dx") + long <= width, "".join(text.itertext())
        if "soft" in classes:
            times.append((left, left + long))
    assert len(times) >= 3 and all(a[1] < b[0] for a, b in pairwise(times))


def test_a_drawing_names_kernels_that_share_a_colour():
    spans = [Span(f"k{i}", "blk.0", 10.0 * i, 10.0, own=10.0) for i in range(20)]
    root = ET.fromstring(timeline([("t", Pass("tg", 200.0, spans))]))
    shown = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert shown[-1] == "5 others25.0 %" and "k145.0 %" in shown and "k155.0 %" not in shown


def test_own_time_of_ranges_within_ranges():
    events = [
        named(PASS, "pp", 0, 100),
        named("blk.0", "Attention", 10, 50),
        named("blk.0", "attn_q", 15, 10, 1000),
        named("blk.0", "attn_k", 30, 5),
        named("blk.0", "GatedFFN", 60, 30),
        named("output", "output", 92, 4),
    ]
    spans = {s.name: s for s in passes_of({"traceEvents": events})[0].spans}
    assert spans["Attention"].own == 35 and spans["attn_q"] == Span(
        "attn_q", "blk.0", 15, 10, 1000, 1, 10, "attn_q"
    )
    assert spans["GatedFFN"].own == 30 and sum(s.own for s in spans.values()) == 84


ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul> >(int, float)"
)


@pytest.mark.parametrize(
    "name, short",
    [
        (ELEMENTWISE, "vectorized_elementwise_kernel<4, CUDAFunctor...>, array<...>"),
        ("void (anonymous namespace)::f<(int)4, (bool)1>(float*)", "f<4, 1>"),
        ("nvjet_tst_128x256", "nvjet_tst_128x256"),
        ("matvec(unsigned char const*, float)", "matvec"),
    ],
)
def test_names_of_kernels(name, short):
    assert short_name(name) == short


@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:Q8_0"])
def test_a_model_on_the_cpu(spec):
    with Model(SyntheticSource(spec), torch.device("cpu")) as model:
        before = model.forward([1, 2, 3])
        with recording():
            assert torch.equal(model.forward([1, 2, 3]), before)
        profiles = profile_model(model, 8, 3, n_depth=4)
    assert {label: len(passes) for label, passes in profiles.items()} == {"pp8": 3, "tg": 3}
    spans = profiles["tg"][-1].spans
    kinds = {(s.layer, s.name) for s in spans}
    wanted = {
        ("blk.1", "Attention"),
        ("blk.0", "attn_q"),
        ("token_embd", "token_embd"),
        ("output", "output"),
        ("output", "output_norm"),
    }
    assert wanted <= kinds
    assert {
        ("blk.0", "ffn_gate_exps" if "moe" in spec else "ffn_gate"),
        ("blk.0", "ffn_norm"),
    } <= kinds
    for p in profiles["tg"]:
        assert sum(s.own for s in p.spans) <= p.duration * 1.001 and all(
            s.own >= -0.5 for s in p.spans
        )


def test_ranges_are_opened_only_while_recording():
    with pytest.raises(KeyError), recording():
        with recording():
            assert recording
        assert recording
        raise KeyError
    assert not recording
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as recorded:
        with opened("blk.0", "before"):
            torch.ones(1)
        with recording(), opened("blk.0", "within", 7):
            torch.ones(1)
    names = [event.name for event in recorded.events() if event.name.startswith(PREFIX)]
    assert names == ["iqforge|blk.0|within|7"]


def test_parts_of_experts_are_within_their_layer():
    """The shared expert, the router and the experts have ranges too."""
    path = shared("golden/convert/qwen3_5_moe/expected-f32.gguf")
    with load_model(path) as model:
        spans = profile_model(model, 4, 1)["pp4"][-1].spans
    kinds = {(s.layer, s.name) for s in spans}
    for layer in ("blk.0", "blk.3"):
        assert {(layer, kind) for kind in ("MoE", "Router", "Experts", "GatedFFN")} <= kinds
    assert {("blk.2", "DeltaNet"), ("blk.2", "ssm_out"), ("blk.3", "Attention")} <= kinds
    assert {("blk.3", "post_attention_norm"), ("blk.3", "attn_q_norm")} <= kinds
    sizes = {s.name: s.n_bytes for s in spans}
    assert sizes["ssm_out"] == 4 * 32 * 96 and sizes["output"] == 4 * 288 * 32


def test_command(tmp_path, capsys):
    out = tmp_path / "p.svg"
    assert (
        main(
            [
                "profile",
                "--device",
                "cpu",
                "--synthetic",
                "llama-tiny:Q8_0",
                "-p",
                "8",
                "-n",
                "2",
                "-o",
                str(out),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    # Of the heading.
    assert [_how(*of) for of in (("pp8", True), ("pp8", False), ("tg", True))] == [
        " without graphs",
        "",
        "",
    ]
    assert (
        "llama-tiny:Q8_0 pp8: 2 passes" in text
        and "llama-tiny:Q8_0 tg: 1 pass" in text
        and "| blk.1 " in text
        and "| attn_q " in text
    )
    assert ET.parse(out).getroot().tag == f"{SVG}svg" and not (tmp_path / "p.svg.part").exists()
    assert (
        main(
            [
                "profile",
                "--device",
                "cpu",
                "--synthetic",
                "llama-tiny:Q8_0",
                "-o",
                str(tmp_path / "no" / "p.svg"),
            ]
        )
        == 1
    )
    captured = capsys.readouterr()
    assert "cannot be written" in captured.err and not captured.out  # before the work
    assert (
        main(
            [
                "profile",
                "--device",
                "cpu",
                "--synthetic",
                "llama-tiny:Q8_0",
                "-o",
                str(tmp_path / "p.png"),
            ]
        )
        == 1
    )
    assert "expected FILE.svg" in capsys.readouterr().err
    assert (
        main(["profile", "--device", "cpu", "--synthetic", "llama-tiny:Q8_0", "-o", str(tmp_path)])
        == 1
    )
    captured = capsys.readouterr()
    assert "it is a folder" in captured.err and not captured.out
    assert (
        main(["profile", "--device", "cpu", "--synthetic", "llama-tiny:Q8_0", "-ub", "1,2"]) == 1
        and "lists" in capsys.readouterr().err
    )
    assert main(["profile", "--device", "cpu"]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    assert "without CUDA graphs" in " ".join(capsys.readouterr().out.split())
    assert (
        main(["profile", "--device", "cpu", "--synthetic", "llama-tiny:Q8_0", "-p", "0", "-n", "0"])
        == 1
    )

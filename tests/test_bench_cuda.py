"""bench and profile on a GPU: random weights in its memory, shares of its limits, layers of kernels
in replayed graphs.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from iqforge.cli import main
from iqforge.cuda_kernels.packed.decode import decode_matrix
from iqforge.formats.codecs import codec
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cuda.common.device_facts import device_facts
from iqforge.runtime.model import Model
from iqforge.runtime.profile.profile import profile_model
from iqforge.runtime.profile.report import measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_rows_that_repeat_are_those_of_the_source():
    source = SyntheticSource("llama-8b:IQ4_K")
    with Model(source, "cuda") as model:
        q = model.network.blocks[3].mixer.output
        q.matrix.resident.load()
        tensor = next(t for t in source.tensors if t.name == q.name)
        got = decode_matrix(q.matrix.packed, torch.float32).cpu().numpy()
        assert source.period(tensor) < tensor.n_rows  # there is something to repeat
        assert np.array_equal(
            got,
            codec.decode(
                tensor.type,
                source.read_rows(tensor, 0, tensor.n_rows),
                tensor.n_cols,
                as_weights=True,
            ),
        )


@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:Q8_0"])
def test_bench(spec, capsys):
    assert (
        main(
            [
                "bench",
                "--device",
                "cuda",
                "--synthetic",
                spec,
                "-p",
                "64",
                "-n",
                "8",
                "-r",
                "2",
                "-o",
                "jsonl",
                "-oe",
                "md",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    pp, tg = (json.loads(line) for line in captured.out.splitlines())
    facts = device_facts()
    assert (
        pp["cuda"]
        and pp["gpu_info"] == facts.name
        and pp["precision"] == "bf16"
        and pp["n_gpu_layers"] == 99
    )
    if facts.bandwidth:
        assert (
            tg["share_of_bandwidth"] == pytest.approx(1e9 * tg["gbytes_per_s"] / facts.bandwidth)
            and "% bw" in captured.err
        )
    if facts.bf16_rate:
        assert 0 < pp["share_of_flop_rate"] < 1 and f"limits: {facts.describe()}" in captured.err
    words = [
        "bench",
        "--device",
        "cuda",
        "--synthetic",
        spec,
        "-p",
        "16",
        "-n",
        "2",
        "-r",
        "1",
        "-o",
        "jsonl",
    ]
    assert main([*words, "-ngl", "1", "--precision", "f32"]) == 0
    # Some layers are on the CPU.
    assert [
        json.loads(line)["share_of_bandwidth"] for line in capsys.readouterr().out.splitlines()
    ] == [
        None,
        None,
    ]


@pytest.mark.parametrize("spec", ["llama-tiny:IQ4_K", "qwen3moe-tiny:Q8_0"])
def test_profile(spec):
    with Model(SyntheticSource(spec), "cuda") as model:
        profiles = profile_model(model, 32, 6)
    for label in ("pp32", "tg"):
        layers = [{span.layer for span in p.spans} for p in profiles[label]]
        assert all({"blk.0", "blk.1"} <= found for found in layers), label
        assert all(p.spans and 0 < p.busy <= p.duration * 1.01 for p in measured(profiles[label]))
    if any(p.replayed for p in profiles["tg"]):
        assert {"token_embd", "blk.0", "blk.1", "output"} <= {
            span.layer for span in profiles["tg"][-1].spans
        }
        assert sum(span.n_bytes for span in profiles["tg"][-1].spans) > 0


def test_command(tmp_path, capsys):
    out = tmp_path / "p.svg"
    assert (
        main(["profile", "--synthetic", "llama-tiny:IQ4_K", "-p", "32", "-n", "4", "-o", str(out)])
        == 0
    )
    text = capsys.readouterr().out
    assert "| kernel " in text and "| blk.1 " in text and out.read_text().startswith("<svg")

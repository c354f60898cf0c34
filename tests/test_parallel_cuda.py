"""Ranks with GPUs: the sum in shared memory, and models on both paths against one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from iqforge.runtime.parallel.launch import run_ranks

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parent
SPECS = ("llama-tiny:IQ4_K", "qwen3moe-tiny:IQ4_K", "qwen35-tiny:IQ4_K")


def needs(n: int) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} GPUs")


@pytest.mark.parametrize("size", [2, 4])
def test_sums_in_shared_memory(size):
    needs(size)
    program = FOLDER.parent / "benchmarks" / "sums.py"
    done = subprocess.run(
        [sys.executable, program, "--ranks", str(size)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "the bits of the sum in order of ranks" in done.stdout and "gather: right" in done.stdout
    assert "rows: the sum in order of ranks" in done.stdout


@pytest.mark.parametrize("shares", ["1,1", "2,1", "1,1,1,1", "3,1,2,2"])
def test_ranks_give_what_one_gpu_gives(shares, tmp_path):
    size = shares.count(",") + 1
    needs(size)
    program = str(FOLDER / "parallel_on_gpus.py")
    assert run_ranks([sys.executable, program, str(tmp_path), shares, *SPECS], size) == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for case, first in found[0].items():
        most = 1e-3 if " f32 " in case else 0.03
        assert first["twice"], case
        for name in ("pieces", "steps"):
            assert first[f"{name} error"] < most, (case, name)
        if " f32 " in case or "moe" not in case:
            assert first["prompt error"] < most, case
        else:
            # In halves, a router may choose another expert for a row whose experts score alike.
            flipped = {row for _, row in first["flips (layer, row)"]}
            assert len(flipped) <= 10, case
            assert first["their error"] < most, "rows that follow from the same choices"
            assert first["its error"] < most or first["worst row"] in flipped, case
        assert first["shared memory"] == (" bf16 " in case)
        assert all(rank[case]["digits"] == first["digits"] for rank in found), case


@pytest.mark.parametrize("shares", ["1,1", "1,3", "1,1,1,1"])
def test_ranks_with_layers_give_what_one_gpu_gives(shares, tmp_path):
    """The same kernels run in the same order, so the results are nearly the same bits."""
    size = shares.count(",") + 1
    needs(size)
    command = [sys.executable, str(FOLDER / "parallel_on_gpus.py"), "layers"]
    assert run_ranks([*command, str(tmp_path), shares, *SPECS], size) == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for case, first in found[0].items():
        assert [i for rank in found for i in rank[case]["layers"]] == list(
            range(sum(len(rank[case]["layers"]) for rank in found))
        )
        assert first["twice"], case
        for name in ("prompt", "pieces", "steps"):
            assert first[f"{name} error"] < 1e-3, (case, name)
        assert all(rank[case]["digits"] == first["digits"] for rank in found), case
        assert not any(rank[case]["slow"] for rank in found if " bf16" in case), case

"""A run that is killed at a random moment never leaves a file that looks finished, and does not
hinder the next run.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import iqforge
import pytest
from iqforge.convert.checkpoint.safetensors import read_header
from iqforge.errors import IqforgeError
from iqforge.formats.gguf.reader import open_gguf

from .tiny_checkpoint import PROSE, make_tiny_llama

KILLS = 20
CALIBRATE = {
    "calibrate": PROSE * 20,
    "calibrate_chunks": 6,
    "calibrate_ctx": 64,
    "hessian_shrink": 0.5,
    "pure": True,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def fresh():
    """Start processes that have already imported iqforge and have no threads of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "iqforge.api",
            "iqforge.quantize.run.stream",
            "iqforge.convert.source",
            "iqforge.formats.gguf.writer",
        ]
    )
    context.Process(target=os.getpid).start()
    return context


def converted(context, *arguments, **options) -> multiprocessing.Process:
    process = context.Process(
        target=iqforge.convert_model, args=(*arguments, "bf16"), kwargs=options
    )
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"split_max_tensors": 20}], ids=["one file", "shards"])
def test_killed_at_random_moments(tmp_path: Path, fresh, limits: dict):
    folder = make_tiny_llama(tmp_path / "model", n_layers=8, dtype="f32", n_embd=512)
    expected = read_all(
        iqforge.convert_model(folder, make(tmp_path / "expected") / "x.gguf", "bf16", **limits)
    )
    assert len(expected) == (1 if not limits else 4)
    out = make(tmp_path / "out")
    # The first may have to compile.
    whole = min(seconds_of_a_run(fresh, folder, out, expected, limits) for _ in range(2))
    chance = random.Random(7)
    broken_off = 0
    for number in range(10 * KILLS):
        if broken_off == KILLS // 2:
            break
        if number % 3 == 0:  # with and without the files of an earlier run
            for file in out.iterdir():
                file.unlink()
        before = {file.name for file in out.glob("*.gguf")}
        began, process = time.monotonic(), converted(fresh, folder, out / "x.gguf", **limits)
        time.sleep(chance.uniform(0.1, 1) * whole)
        process.kill()  # SIGKILL; nothing if it has ended by itself
        process.join()
        broken_off += process.exitcode != 0
        if process.exitcode == 0:  # the machine is less busy than it was
            whole = min(whole, time.monotonic() - began)
        for name in {file.name for file in out.glob("*.gguf")}:
            assert (out / name).read_bytes() == expected[name], (
                f"{name} after kill {number} (before: {sorted(before)})"
            )
        first = min(expected)
        if (out / first).exists():
            with open_gguf(out / first) as file:
                assert len(file.tensors) == len(read_header(folder / "model.safetensors"))
        else:
            with pytest.raises(IqforgeError):
                open_gguf(out / first)
    assert broken_off == KILLS // 2
    iqforge.convert_model(folder, out / "x.gguf", "bf16", **limits)
    assert read_all(out) == expected  # nothing is left next to them


@pytest.mark.full
def test_calibrating_killed_at_random_moments(tmp_path: Path, fresh):
    """Resumed runs end with the bytes of an undisturbed one, wherever they were killed."""
    folder = make_tiny_llama(tmp_path / "model", n_layers=4, dtype="f32", n_embd=256)

    def started(out: Path) -> multiprocessing.Process:
        process = fresh.Process(
            target=iqforge.quantize_model, args=(folder, out, "Q4_0"), kwargs=CALIBRATE
        )
        process.start()
        return process

    process = started(tmp_path / "whole")
    process.join()
    assert process.exitcode == 0
    began, process = time.monotonic(), started(tmp_path / "again")  # without compiling
    process.join()
    whole = time.monotonic() - began
    expected = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "again").read_bytes() == expected
    chance, out, killed = random.Random(7), tmp_path / "out", 0
    for _ in range(3 * KILLS):
        process = started(out)
        time.sleep(chance.uniform(0.2, 0.9) * whole)
        process.kill()
        process.join()
        killed += process.exitcode != 0
        if process.exitcode == 0:
            whole *= 0.9  # the machine is less busy than it was
            assert out.read_bytes() == expected
            out.unlink()
        if killed == KILLS:
            break
    assert killed == KILLS
    process = started(out)
    process.join()
    assert process.exitcode == 0 and out.read_bytes() == expected
    assert {file.name for file in tmp_path.iterdir()} == {"model", "whole", "again", "out"}


def seconds_of_a_run(
    context, folder: Path, out: Path, expected: dict[str, bytes], limits: dict
) -> float:
    started = time.monotonic()
    process = converted(context, folder, out / "x.gguf", **limits)
    process.join()
    assert process.exitcode == 0 and read_all(out) == expected
    return time.monotonic() - started


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def read_all(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in (path if path.is_dir() else path.parent).iterdir()
    }

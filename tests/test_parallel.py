"""Ranks on CPUs: what they exchange, how they start, and how they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from iqforge.errors import UsageError
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.ranks import Ranks

PROGRAM = Path(__file__).with_name("parallel_program.py")


def command(*words: object) -> list[str]:
    return [sys.executable, str(PROGRAM), *map(str, words)]


@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_exchange(size, tmp_path):
    assert run_ranks(command("collectives", tmp_path), size) == 0
    check_exchanged(tmp_path, size)


def check_exchanged(folder: Path, size: int) -> None:
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    for rank, one in enumerate(found):
        for kind, most in (("f32", 1e-5), ("bf16", 0.06), ("f16", 0.008), ("q8_0", 0.06)):
            assert one[kind]["error"] < most, kind
            assert one[kind]["digits"] == found[0][kind]["digits"], "all ranks have the same bits"
        assert one["q8_0"]["error"] > 1e-3, "8 bits were moved"
        assert one["few"] < 1e-5, "few rows move in float32, here with q8_0"
        assert one["gather"], rank
        assert one["tokens"] == [7] and one["first"] == {"rank": 0}
        assert one["all"] == list(range(size)) and one["agree"] == [True, False]


def test_torchrun_starts_ranks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "0",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    subprocess.run(
        [*torchrun, "--rdzv-backend", "c10d", *command("collectives", tmp_path)[1:]],
        check=True,
        timeout=120,
        capture_output=True,
    )
    check_exchanged(tmp_path, 2)


@pytest.mark.parametrize(
    "case, status, said",
    [
        ("killed", 128 + signal.SIGKILL, "rank 1 of 3 was ended by SIGKILL"),
        ("refused", 1, "rank 1 of 3 has failed:\nthe file of rank 1 is broken"),
        ("late", 1, "s for results of rank 1, at most 3 s (--timeout)"),
    ],
)
def test_a_rank_that_fails_ends_all(case, status, said, capfd):
    begun = time.monotonic()
    assert run_ranks(command(case), 3) == status
    assert time.monotonic() - begun < 20  # most of it to start
    assert said in capfd.readouterr().err
    assert not running("parallel_program.py")


def test_ranks_end_with_who_started_them():
    """Also if that is killed, and cannot end them."""
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    starter = "from iqforge.runtime.parallel.launch import run_ranks; import sys;"
    sleep = f"run_ranks([sys.executable, '-c', 'import time; time.sleep(99) # {mark}'], 2)"
    process = subprocess.Popen([sys.executable, "-c", starter + sleep])
    try:
        wait_until(lambda: len(running(mark)) == 3)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not running(mark))


def running(text: str) -> list[int]:
    """Return the processes whose command line has `text`, other than this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in words and "-m\0pytest" not in words:
                found.append(int(folder.name))
    return found


def wait_until(true, seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_the_rank_that_the_environment_gives():
    assert Ranks.here({}) is None
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = Ranks.here(two)
    assert ranks == Ranks(1, 2, 0, 1) and not ranks.one_host
    assert Ranks.here({"RANK": "0", "WORLD_SIZE": "2"}) == Ranks(0, 2, 0, 2)
    with pytest.raises(UsageError, match="RANK is 'x'"):
        Ranks.here(two | {"RANK": "x"})
    with pytest.raises(UsageError, match="rank 2 of 2"):
        Ranks.here(two | {"RANK": "2"})

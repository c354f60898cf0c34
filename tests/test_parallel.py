"""Ranks on CPUs: what they exchange, how they start, and how they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import iqforge
import numpy as np
import pytest
import torch
from iqforge.errors import UsageError
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.parallel.launch import run_ranks
from iqforge.runtime.parallel.ranks import Ranks

from .golden import GOLDEN
from .parallel_program import after_pieces
from .ports import free_port
from .shared import shared

PROGRAM = Path(__file__).with_name("parallel_program.py")
FULL = [pytest.mark.slow, pytest.mark.full]


def command(*words: object) -> list[str]:
    return [sys.executable, str(PROGRAM), *map(str, words)]


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> list[dict]:
    """What three ranks found, started once: in what they exchange, in models, and with options."""
    folder = tmp_path_factory.mktemp("three")
    assert run_ranks(command("several", folder, json.dumps(TOGETHER), *QUICK), 3) == 0
    return written(folder, 3)


def written(folder: Path, size: int) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_what_ranks_exchange(three):
    check_exchanged([one["exchanged"] for one in three])


@pytest.mark.full
def test_what_two_ranks_exchange(tmp_path):
    assert run_ranks(command("collectives", tmp_path), 2) == 0
    check_exchanged(written(tmp_path, 2))


def check_exchanged(found: list[dict]) -> None:
    size = len(found)
    for rank, one in enumerate(found):
        for kind, most in (("f32", 1e-5), ("bf16", 0.06), ("f16", 0.008), ("q8_0", 0.06)):
            assert one[kind]["error"] < most, kind
            assert one[kind]["digits"] == found[0][kind]["digits"], "all ranks have the same bits"
        assert one["q8_0"]["error"] > 1e-3, "8 bits were moved"
        assert one["few"] < 1e-5, "few rows move in float32, here with q8_0"
        assert one["gather"], rank
        assert one["tokens"] == [7] and one["first"] == {"rank": 0}
        assert one["all"] == list(range(size)) and one["agree"] == [True, False]


QUICK = ("llama", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "gpt_oss_mxfp4")


def test_ranks_give_the_logits_of_one(three):
    """Processes, uneven shares, tokens of the first rank, and the same digits twice."""
    check_logits([one["models"] for one in three], QUICK)


@pytest.mark.full
@pytest.mark.parametrize("size, names", [(2, QUICK), (2, GOLDEN), (3, GOLDEN)])
def test_ranks_give_the_logits_of_one_for_every_model(size, names, tmp_path):
    assert run_ranks(command("models", tmp_path, *names), size) == 0
    check_logits(written(tmp_path, size), names)


def check_logits(found: list[dict], names: Sequence[str]) -> None:
    for name in names:
        tokens = np.load(shared(f"golden/convert/{name}/logits.npz"))["input_ids"][:24]
        with iqforge.load_model(shared(f"golden/convert/{name}/expected-f32.gguf")) as model:
            wanted = model.forward(tokens)
            state = model.new_state(64)
            last = model.extend(tokens, state)
            drawn = list(model.follow(5, state, 4, Sampling(seed=0)))
        for mode in ("graph", "layer"):
            key = f"{mode} {name}"
            for one in (rank[key] for rank in found):
                assert one["twice"] and one["digits"] == found[0][key]["digits"], key
                torch.testing.assert_close(torch.tensor(one["logits"]), wanted, rtol=0, atol=1e-3)
                torch.testing.assert_close(torch.tensor(one["last"]), last, rtol=0, atol=1e-2)
                assert one["drawn"] == drawn, "the sampler of the first rank decides"


TOGETHER = {
    "merged experts": {"names": ["qwen3_moe"], "merge_gate_up": True},
    "fewer experts": {"names": ["qwen3_moe"], "expert_reduction": "1,0.5"},
    "cache": {"names": ["qwen3"], "cache_type_k": "q8_0", "cache_type_v": "q4_0"},
    "hadamard": {
        "names": ["gemma3"],
        "cache_type_k": "q8_0",
        "k_cache_hadamard": True,
        "cache_type_v": "q8_0",
        "v_cache_hadamard": True,
    },
    "scores": {"names": ["llama"], "flash_attn": "off", "attention_max_batch": 1},
    "absorbed": {"names": ["deepseek_v2"], "mla": 1},
    "naive": {"names": ["deepseek_v3"], "mla": 0},
    "all positions": {"names": ["gemma3"], "swa_full": True},
    "pieces": {"names": ["gpt_oss_bf16"], "ubatch": 7},
}


def test_other_options_on_ranks(three):
    found = [one["options"] for one in three]
    assert found[0] == found[1] == found[2]
    for key, options in TOGETHER.items():
        wanted = torch.tensor(after_pieces({"device": "cpu"} | options))
        for mode in ("graph", "layer"):
            one = torch.tensor(found[0][f"{mode} {key}"])
            torch.testing.assert_close(one, wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "size, specs",
    [
        (
            2,
            (
                "qwen2moe-tiny:Q8_0",
                "gemma4-tiny:IQ4_K@columns",
                "command-tiny:Q8_0",
                "qwen3moe-tiny:Q8_0@whole+cpu",
            ),
        ),
        pytest.param(
            3,
            (
                "llama-tiny:Q8_0",
                "qwen3moe-tiny:Q8_0",
                "qwen35-tiny:Q8_0",
                "cohere2-tiny:Q8_0",
                "command-tiny:Q8_0",
                "command-tiny:IQ4_K@columns+cpu",
                "gemma4-tiny:IQ4_K",
                "gemma4-tiny:IQ4_K@columns",
                "qwen2moe-tiny:Q8_0@columns",
                "minimax-tiny:Q8_0",
                "nemotron-tiny:Q8_0",
                "nemotron-tiny:Q8_0@columns+cpu",
                "olmo-tiny:Q8_0",
                "lfm2-tiny:Q8_0",
                "falcon-tiny:Q8_0",
                "kimi-tiny:Q8_0",
                "ling-tiny:Q8_0",
                "qwen3moe-tiny:Q8_0@columns+cpu",
                "qwen35-tiny:Q8_0@auto+cpu",
                "gemma4-tiny:IQ4_K@auto+cpu",
                "gemma4-tiny:IQ4_K@columns+cpu",
            ),
            marks=FULL,
        ),
    ],
)
def test_executors_of_ranks(size, specs, tmp_path):
    """The fast path with kernels in torch: prompts and steps, launched and from graphs. In a model
    whose experts are split by columns, ranks have experts without a dense layer, or a dense layer
    without experts. cpu: experts are on the CPU beside the device of each rank.
    """
    program = str(PROGRAM.with_name("parallel_executors.py"))
    assert run_ranks([sys.executable, program, str(tmp_path), *specs], size) == 0
    found = written(tmp_path, size)
    for spec in specs:
        first = found[0][spec]
        errors = first["errors"]
        assert errors.pop("steps") < 1e-4, "steps are in float32"
        assert max(errors.values()) < 0.01, "prompts are in float16"
        assert 0 < max(first["errors in halves"]) < 0.015
        assert max(first["errors with links"]) < 0.01
        by_layers = first["errors by layers"]
        assert by_layers.pop("steps") < 1e-4 and max(by_layers.values()) < 1e-3
        layers = [rank[spec]["layers"] for rank in found]
        assert sum(layers) >= 2 and sum(n == 0 for n in layers) == max(0, size - sum(layers))
        assert all(rank[spec]["captured by layers"] for rank in found), "also with no layer"
        for one in (rank[spec] for rank in found):
            assert one["digits"] == first["digits"]
            assert one["captured"] > 5 and one["linked"] > 5
            told = [line for line in one["slow"] if "page-locked" not in line]
            assert all("grouped product" in line for line in told)


@pytest.mark.full  # so does the next test
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
        timeout=600,
        capture_output=True,
    )
    check_exchanged(written(tmp_path, 2))


@pytest.mark.parametrize("each", [1, pytest.param(4, marks=FULL)])
def test_two_hosts(each, tmp_path):
    """Two calls of torchrun, each for the ranks of one host, here on one machine."""
    names = ["llama"] if each == 1 else ["llama", "qwen3_moe", "qwen3_5_moe", "deepseek_v3"]
    port, started = free_port(), []
    for host in range(2):
        words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        words += ["--nproc-per-node", str(each)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        words += command("models", tmp_path, *names)[1:]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        started.append(subprocess.Popen([sys.executable, *words], env=environment))
    assert [process.wait(600) for process in started] == [0, 0]
    check_logits(written(tmp_path, 2 * each), names)


@pytest.mark.parametrize(
    "case, status, said",
    [
        (
            "killed",
            128 + signal.SIGKILL,
            "rank 1 of 3 was ended by SIGKILL, which the system sends when memory",
        ),
        pytest.param(
            *("refused", 1, "rank 1 of 3 has failed:\nthe file of rank 1 is broken"), marks=FULL
        ),
        pytest.param("late", 1, "s for results of rank 1, at most 20 s (--timeout)", marks=FULL),
        # The store in which ranks say that they wait is in it.
        pytest.param("stopped", 1, "s for results of rank 0, at most 20 s (--timeout)", marks=FULL),
    ],
)
def test_a_rank_that_fails_ends_all(case, status, said, capfd):
    begun, mark = time.monotonic(), f"mark-{os.getpid()}-{time.monotonic_ns()}"
    assert run_ranks(command(case, mark), 3) == status
    assert time.monotonic() - begun < 500  # most of it to start; ranks wait for 600 s by themselves
    assert said in capfd.readouterr().err
    assert not running(mark)


@pytest.mark.full
def test_a_rank_that_cannot_join_ends():
    """torch itself waits without end where a store takes a connection and is silent."""
    program = (
        "from iqforge.runtime.parallel import group; import time; group._MARGIN = 0.1\n"
        "with group._ended_after(0.4, 'rank 1 of 2 cannot reach the others'): time.sleep(99)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: rank 1 of 2 cannot reach the others within 0 s (--timeout)\n"


def test_ranks_end_with_who_started_them():
    """Also if that is killed, and cannot end them."""
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    starter = "from iqforge.runtime.parallel.launch import run_ranks; import sys;"
    sleep = f"run_ranks([sys.executable, '-c', 'import time; time.sleep(999) # {mark}'], 2)"
    process = subprocess.Popen([sys.executable, "-c", starter + sleep])
    try:
        wait_until(lambda: len(running(mark)) == 3)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not running(mark))


def test_ranks_may_finish_where_the_end_is_asked_for_twice(tmp_path):
    """`timeout` sends SIGTERM to the process and then to its group."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    open('leaves' + os.environ['RANK'], 'w').close()\n"
        "    while not os.path.exists('twice'): time.sleep(0.01)\n"
        "    open('left' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(600)\n"
    )
    starter = (
        "import sys\n"
        "from iqforge.runtime.parallel import launch\n"
        "launch._PATIENCE = 240\n"  # the machine may be busy
        "launch._disregard = lambda *_: open('twice', 'w').close()\n"
        "launch.run_ranks([sys.executable, 'rank.py'], 2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", starter], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    for sign in ("ready", "leaves"):
        wait_until(lambda sign=sign: len(list(tmp_path.glob(f"{sign}*"))) == 2)
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode and len(list(tmp_path.glob("left*"))) == 2
    assert "During handling" not in said


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


def wait_until(true, seconds: float = 240) -> None:
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

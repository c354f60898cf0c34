"""`-sm` and what belongs to it: which devices, which shares, and what goes together with it."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import iqforge
import pytest
import torch
from iqforge.cli import main
from iqforge.cuda_kernels.peer.links import opened_by_all
from iqforge.errors import DeviceError, UsageError
from iqforge.runtime import start_ranks
from iqforge.runtime.cuda.step.links import named_waits
from iqforge.runtime.options import LoadOptions
from iqforge.runtime.parallel.modes import COMBINATIONS, Split, parse_shares, planned_split
from iqforge.runtime.parallel.modes import split_notes as notes
from iqforge.runtime.parallel.ranks import Ranks

from .shared import shared

MODEL = "golden/convert/llama/expected-f32.gguf"
GPU, CPU = True, False
WHOLE = "one device has the whole model (-sm graph and -sm layer split it)"


@pytest.mark.parametrize(
    "text, shares",
    [
        ("1", (1,)),
        ("3,1", (3, 1)),
        ("0.5/.5", (0.5, 0.5)),
        ("0;1.", (0, 1)),
        ((3, 1), (3, 1)),
        ([0.25, 1e-6], (0.25, 1e-6)),
        (2, (2,)),
    ],
)
def test_shares(text, shares):
    assert parse_shares(text) == shares


@pytest.mark.parametrize(
    "text",
    [
        *["0", "0,0", "-1,1", "a", "1,,2", "1,", "nan", "inf", "1e3", "9" * 400],
        *["0." + "0" * 400 + "1", (), (0, 0.0), (1, "x"), (1, None), (1, float("inf"))],
    ],
)
def test_wrong_shares(text):
    with pytest.raises(UsageError, match="^-ts is '"):
        parse_shares(text)


@pytest.mark.parametrize(
    "words", [("-ts", "-1,1"), ("-ts=-1,1",), ("--tensor-split", "-1,1"), ("--tensor-split=-1,1",)]
)
def test_a_negative_share_is_named(words, capsys):
    """argparse alone would take it for a flag."""
    flags = ("-m", shared(MODEL), "-p", "a", "--device", "cpu", "-sm", "graph")
    assert main(["generate", *map(str, flags), *words]) == 1
    said = capsys.readouterr().err
    assert "-ts is '-1,1': share 1 is -1, expected 0 or more" in said
    with pytest.raises(UsageError, match="^-ts is '3,-1.5': share 2 is -1.5,"):
        parse_shares("3,-1.5")


@pytest.mark.parametrize("on_gpu", [CPU, GPU])
def test_a_single_process_of_torchrun_has_the_whole_model(on_gpu):
    given = LoadOptions(split_mode="graph")
    split = planned_split(given, on_gpu, 2, Ranks(0, 1, 0, 1))
    assert split.n_ranks == 1 and notes(given, split) == [("-sm", "one process was started")]


@pytest.mark.parametrize(
    "options, on_gpu, n_gpus, split",
    [
        ({}, GPU, 4, Split("none")),
        ({"main_gpu": 2}, GPU, 4, Split("none", (2,))),
        ({"split_mode": "graph"}, GPU, 2, Split("graph", (0, 1), (0.5, 0.5))),
        ({"split_mode": "tensor"}, GPU, 2, Split("graph", (0, 1), (0.5, 0.5))),
        (
            {"split_mode": "graph", "tensor_split": "3,0,1"},
            GPU,
            4,
            Split("graph", (0, 2), (0.75, 0.25)),
        ),
        (
            {"split_mode": "graph", "tensor_split": "3,1", "main_gpu": 1},
            GPU,
            2,
            Split("graph", (1, 0), (0.25, 0.75)),
        ),
        ({"split_mode": "layer"}, GPU, 2, Split("layer", (0, 1), (0.5, 0.5))),
        (
            {"split_mode": "layer", "tensor_split": "3,1"},
            CPU,
            0,
            Split("layer", (0, 1), (0.75, 0.25)),
        ),
        ({"split_mode": "graph", "max_gpu": 2}, GPU, 4, Split("graph", (0, 1), (0.5, 0.5))),
        (
            {"split_mode": "graph", "tensor_split": "1,1,2"},
            CPU,
            0,
            Split("graph", (0, 1, 2), (0.25, 0.25, 0.5)),
        ),
    ],
)
def test_devices_and_shares(options, on_gpu, n_gpus, split):
    assert planned_split(LoadOptions(**options), on_gpu, n_gpus) == split


@pytest.mark.parametrize(
    "options, on_gpu, n_gpus, why",
    [
        ({"split_mode": "graph"}, GPU, 1, "there is one GPU to use"),
        ({"split_mode": "graph", "max_gpu": 1}, GPU, 4, "there is one GPU to use"),
        ({"split_mode": "graph"}, CPU, 0, "everything is on the CPU, and -ts names no shares"),
        ({"split_mode": "layer"}, GPU, 1, "there is one GPU to use"),
        ({"split_mode": "layer"}, CPU, 0, "everything is on the CPU, and -ts names no shares"),
        ({"tensor_split": "1,1"}, CPU, 0, "everything is on the CPU"),
        ({"tensor_split": "1,1"}, GPU, 2, WHOLE),
        ({"reduce_type": "f32"}, GPU, 2, WHOLE),
    ],
)
def test_what_changes_nothing_is_said(options, on_gpu, n_gpus, why):
    given = LoadOptions(**options)
    split = planned_split(given, on_gpu, n_gpus)
    [(_, said)] = notes(given, split)
    assert split.n_ranks == 1 and said == why


def test_ranks_with_layers_add_nothing_up():
    given = LoadOptions(split_mode="layer", reduce_type="f32", split_experts="whole")
    flags = "-grt, --split-experts"
    assert notes(given, planned_split(given, GPU, 2)) == [
        (flags, "ranks with whole layers add nothing up")
    ]


@pytest.mark.parametrize(
    "options, on_gpu, ranks, expected",
    [
        (
            {"split_mode": "data", "reduce_type": "f32"},
            GPU,
            None,
            [("-grt", "ranks with the whole model add nothing up")],
        ),
        (
            {"main_gpu": 1, "tensor_split": "1,1"},
            CPU,
            None,
            [("-mg", "everything is on the CPU")],
        ),
        ({"main_gpu": 1}, GPU, None, []),
        (
            {"main_gpu": 1, "max_gpu": 1},
            GPU,
            Ranks(0, 2, 0, 2),
            [
                ("-mg", "each process takes the device of its own number"),
                ("--max-gpu", "2 processes were started"),
            ],
        ),
    ],
)
def test_ranks_say_what_they_do_not_use(options, on_gpu, ranks, expected):
    given = LoadOptions(**{"split_mode": "graph"} | options)
    assert notes(given, planned_split(given, on_gpu, 2, ranks), on_gpu) == expected


@pytest.mark.parametrize(
    "options, n_gpus, message",
    [
        ({"tensor_split": "1,1,1"}, 2, "-ts or -dev asks for 3 GPUs, here are 2"),
        ({"main_gpu": 3}, 2, "-mg is 3, which is not one of the GPUs"),
        ({"tensor_split": "1,0", "main_gpu": 1}, 2, "-mg is 1, which is not one"),
        ({}, 9, "over 9 devices, expected at most 8"),
        ({"fit": 100}, 2, "--fit does not go together with -sm graph"),
    ],
)
def test_what_is_refused(options, n_gpus, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        planned_split(LoadOptions(split_mode="graph", **options), GPU, n_gpus)


GIVEN = {
    "--fit": {"fit": 1024},
    "-cmoe": {"cpu_moe": True},
    "--n-cpu-moe": {"n_cpu_moe": 1},
    "-ot": {"override_tensor": ("ffn_down=CPU",)},
    "-ngl": {"gpu_layers": 1},
    "-muge": {"merge_gate_up": True},
    "-ctk": {"cache_type_k": "q8_0"},
    "-ctv": {"cache_type_v": "q8_0"},
    "-khad": {"k_cache_hadamard": True},
    "-vhad": {"v_cache_hadamard": True},
    "-ser": {"expert_reduction": "1,0.5"},
    "-fa off": {"flash_attn": "off"},
    "-amb": {"attention_max_batch": 64},
    "-mla": {"mla": 1},
    "--swa-full": {"swa_full": True},
}


@pytest.mark.parametrize("mode", ["graph", "layer", "data"])
def test_every_combination_does_what_the_table_says(mode):
    assert GIVEN.keys() == {one.flag for one in COMBINATIONS}
    for one in COMBINATIONS:
        options = LoadOptions(split_mode=mode, **GIVEN[one.flag])
        assert one.given(options) and not one.given(LoadOptions(split_mode=mode))
        if one.effect == "refused":
            refused = f"{one.flag} does not go together with -sm {mode}: "
            with pytest.raises(UsageError, match=re.escape(refused)):
                planned_split(options, GPU, 2)
        else:
            assert one.effect == "works" and one.layer
            assert planned_split(options, GPU, 2).mode == mode


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (float("inf"), "timeout is inf, expected a finite number"),
        (1e30, "timeout .* expected at most 10000000 seconds"),
        (10_000_001, "timeout .* expected at most 10000000 seconds"),
    ],
)
def test_a_wait_without_end_is_refused(seconds, expected):
    with pytest.raises(UsageError, match=expected):
        LoadOptions(timeout=seconds).check_sizes()


@pytest.mark.parametrize(
    "words",
    [["perplexity", "-f", "x"], ["imatrix", "-f", "x", "-sm", "layer"], ["hessian", "-sm", "data"]],
    ids=" ".join,
)
def test_processes_that_share_no_work_leave_it_to_the_first(words, monkeypatch, capsys):
    """torchrun starts several of a command that runs in one."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main([*words, "-m", "no such file"]) == 0
    assert "note: process 1 of 2 does nothing" in capsys.readouterr().err


def test_the_interface_needs_processes():
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        iqforge.load_model(shared(MODEL), device="cpu", split_mode="graph", tensor_split="1,1")


@pytest.fixture
def run(monkeypatch, capfd):
    """A command of this process, which starts the ranks."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main([*map(str, words)])
        return status, *capfd.readouterr()

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return run


TWO = ("--device", "cpu", "-sm", "graph", "-ts", "1,1")


def test_a_command_runs_as_ranks_and_prints_once(run):
    model = shared(MODEL)
    words = ("-m", model, "-m", model, "-p", 8, "-n", 4, "-r", 1, "-o", "csv", "-oe", "md")
    status, out, err = run("bench", *words, *TWO)
    assert status == 0, err
    head, *rows = [line for line in out.splitlines() if line]
    assert head.startswith("build_commit") and len(rows) == 4
    assert all('"graph"' in row and '"1,1"' in row for row in rows)
    assert re.search(r"\| sm +\| ts +\| +test \|", err)
    assert len(re.findall(r"\| graph +\| 1,1 +\|", err)) == 4
    said = re.findall(r"^rank (\d) on cpu: weights of \d+\.\d MiB", err, re.MULTILINE)
    assert said == ["0", "1"] * 2
    assert err.count(f"{model}:\nrank 0 on cpu") == 2, "lines of several models name them"
    assert err.count("steps run layer by layer, in float32: there are several ranks") == 2


@pytest.mark.full
def test_a_profile_is_that_of_the_first_rank(run, tmp_path):
    drawing = tmp_path / "profile.svg"
    words = ("-m", shared(MODEL), "-p", 8, "-n", 2, "-o", drawing)
    status, out, err = run("profile", *words, *TWO)
    assert status == 0, err
    assert len(re.findall("^.* pp8", out, re.MULTILINE)) == 1 and "Attention" in out
    assert drawing.read_text().startswith("<svg")


def test_an_error_of_all_ranks_is_said_once(run):
    status, out, err = run("bench", "-m", "/nowhere.gguf", *TWO)
    assert status == 1 and not out
    assert err.count("/nowhere.gguf") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    "step, prompt, said", [(1, None, "rank 1 in a step"), (None, 0, "rank 0 in a prompt")]
)
def test_a_kernel_that_has_waited_too_long_says_for_whom(step, prompt, said):
    group = SimpleNamespace(rank=2, size=3, timeout=9.0)
    context = SimpleNamespace(group=group, row_links=SimpleNamespace(missing=prompt))
    message = f"^rank 2 of 3 has waited 9 s for {said}"
    links = SimpleNamespace(missing=step)
    with pytest.raises(DeviceError, match=message), named_waits(links, context):
        raise RuntimeError("unspecified launch failure")
    alone = SimpleNamespace(group=None, row_links=None)
    with pytest.raises(RuntimeError, match="something else"), named_waits(None, alone):
        raise RuntimeError("something else")


@pytest.fixture
def four_gpus(monkeypatch):
    """A host on which GPUs are only counted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def usable(device):
        device = torch.device("cuda" if device == "auto" else device)
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device

    monkeypatch.setattr(start_ranks, "usable_device", usable)


@pytest.mark.parametrize(
    "options, number",
    [
        ({}, 0),
        ({"main_gpu": 3}, 3),
        ({"split_mode": "graph", "tensor_split": "0,0,1"}, 2),
        ({"split_mode": "layer", "tensor_split": "1,1", "max_gpu": 1, "main_gpu": 1}, 1),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_one_gpu_is_the_one_that_has_the_share(device, options, number, four_gpus):
    found = start_ranks.device_here(LoadOptions(device=device, **options))
    assert found == torch.device("cuda", number)


@pytest.mark.parametrize(
    "device, options, devices, shares",
    [
        ("CUDA0,CUDA1", {}, (0, 1), (0.5, 0.5)),
        ("cuda:1,cuda:3", {"tensor_split": "3,1"}, (1, 3), (0.75, 0.25)),
        ("CUDA3/CUDA0/CUDA2", {"tensor_split": (1, 2, 1)}, (3, 0, 2), (0.25, 0.5, 0.25)),
        ("cuda:2,1", {"split_mode": "layer"}, (2, 1), (0.5, 0.5)),
        ("CUDA0,CUDA1,CUDA2", {"max_gpu": 2}, (0, 1), (0.5, 0.5)),
    ],
)
def test_listed_gpus(device, options, devices, shares, four_gpus):
    chosen = LoadOptions(**{"device": device, "split_mode": "graph"} | options)
    split = start_ranks.split_of(chosen)
    assert (split.devices, split.shares) == (devices, shares)
    assert not notes(chosen, split)
    # A rank replaces the device by its own.
    assert replace(chosen, device=f"cuda:{devices[1]}").split(torch.device("cuda")) == split


@pytest.mark.parametrize(
    "device, options, message",
    [
        ("CUDA0,CUDA1", {"split_mode": None}, "^-dev CUDA0,CUDA1 names 2 GPUs, .* unless -sm grap"),
        ("CUDA0,CUDA1", {"split_mode": "none"}, "^-dev CUDA0,CUDA1 names 2 GPUs"),
        ("cuda:1,1", {}, "names a GPU twice"),
        ("CUDA0,CUDA1", {"main_gpu": 1}, "and -mg exclude each other"),
        ("CUDA2,CUDA1,CUDA0", {}, "in order of their numbers: -dev CUDA2,CUDA0,CUDA1$"),
        ("CUDA0,CUDA1", {"tensor_split": "1,1,1"}, "^-ts has 3 shares, -dev CUDA0,CUDA1 names 2"),
    ],
)
def test_lists_of_gpus_that_are_refused(device, options, message):
    with pytest.raises(UsageError, match=message):
        LoadOptions(**{"device": device, "split_mode": "graph"} | options)


def test_commands_on_one_device_and_lists_of_bench(capsys):
    for words, said in (
        ("embedding -m x -p a -dev CUDA0,CUDA1 -sm graph", "names several GPUs, expected one: emb"),
        ("imatrix -m x -f default -dev CUDA0,CUDA1", "-sm data has other chunks on each GPU"),
        ("bench -m x -dev CUDA0,CUDA1", "several GPUs together are -dev CUDA0/CUDA1 with -sm"),
        ("bench -m x -dev CUDA0/CUDA1", "-dev CUDA0/CUDA1 names 2 GPUs"),
        ("generate -m x -p a -dev cuda:0,cuda:1", "-dev cuda:0,cuda:1 names 2 GPUs"),
    ):
        assert main(words.split()) == 1 and said in capsys.readouterr().err, words


def test_a_named_gpu_is_not_the_gpu_of_all_ranks(four_gpus, monkeypatch):
    options = LoadOptions(device="cuda:1", split_mode="graph", tensor_split="1,1")
    with pytest.raises(UsageError, match="--device cuda:1 is one GPU, -sm graph takes 2"):
        start_ranks.run_as_ranks(["bench"], options)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="cuda:1: the GPU of this rank is cuda:0"):
        start_ranks.device_here(options)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert start_ranks.device_here(options) == torch.device("cuda", 1)


@pytest.mark.parametrize("where", ["allocate", "open"])
def test_all_ranks_learn_that_one_cannot_share_its_memory(where):
    """So that all go through NCCL, and the next exchange is of the same things."""
    meet, passed = threading.Barrier(2), [[], []]

    class Memory:
        address = 0

        def __init__(self, rank):
            self.fails, self.closed = rank == 1, False
            if self.fails and where == "allocate":
                raise DeviceError("out of memory")

        def handle(self):
            return b"handle"

        def open(self, handle):
            if self.fails:
                raise DeviceError("no access")
            return 1

        def close(self):
            self.closed = True

    def rank(own):
        def exchange(data):
            passed[own].append(data)
            meet.wait(240)
            both = [passed[0][-1], passed[1][-1]]
            meet.wait(240)
            return both

        made = []
        try:
            opened_by_all(lambda: made.append(Memory(own)) or made[0], own, exchange)
        except DeviceError as error:
            return str(error), all(memory.closed for memory in made)
        return "opened", False

    with ThreadPoolExecutor(2) as threads:
        (first, second) = threads.map(rank, range(2))
    own = {"allocate": "out of memory", "open": "no access"}[where]
    assert (first, second) == (("another GPU cannot share its memory", True), (own, True))
    assert len(passed[0]) == len(passed[1]) == 2


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="-ts has 2 shares, but 3 processes were started"):
        iqforge.load_model(shared(MODEL), device="cpu", split_mode="graph", tensor_split="1,1")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "words",
    [
        "perplexity -m missing.gguf -f here.txt",
        "perplexity -m here.txt -f missing.gguf",
        "bench -m here.txt -m missing.gguf",
        "generate -m here.txt -f missing.gguf",
        "chat -m here.txt -sysf missing.gguf",
        "chat -m here.txt --messages missing.gguf",
        "generate -m here.txt -p a --lora missing.gguf:0.5",
        "perplexity -m here.txt -f here.txt --kl-divergence-against missing.gguf",
        "perplexity -m here.txt --kl-divergence --kl-divergence-base missing.gguf",
    ],
)
def test_missing_files_are_found_before_ranks_start(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a text")
    monkeypatch.setattr(start_ranks, "run_ranks", lambda *args, **options: pytest.fail("started"))
    assert main([*words.split(), "--device", "cpu", "-sm", "graph", "-ts", "1,1"]) == 1
    assert "missing.gguf: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "imatrix -m here.gguf -f default -o x.gguf -sm data",
        "perplexity -m here.gguf -f here.gguf --kl-divergence-base written -sm graph",
        "generate -m here.gguf -p a -s -1 -sm graph",
        "chat -m here.gguf -s -1 -sm graph",
        "generate -m hf://someone/model -p a -sm graph",
    ],
)
def test_what_is_no_file_to_read_is_not_looked_for(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_ranks, "run_ranks", lambda *args, **options: 7)
    (tmp_path / "here.gguf").write_bytes(b"GGUF")
    assert main([*words.split(), "--device", "cpu", "-ts", "1,1"]) == 7


@pytest.mark.parametrize(
    "words, said",
    [
        ("perplexity -m here.txt -f here.txt", "here.txt, at byte 0: not a GGUF file"),
        ("bench -m here.gguf -m empty.gguf", "empty.gguf: the file has 0 bytes"),
        ("generate -m part.safetensors -p a", "is a file of a checkpoint: name its folder"),
        (
            "perplexity -m here.gguf -f here.txt --kl-divergence-against here.txt",
            "here.txt, at byte 0: not a GGUF file",
        ),
        ("perplexity -m here.gguf", "-f TEXT or -p TEXT is needed"),
        ("perplexity -m here.gguf -f /dev/stdin", "/dev/stdin can be read by one process only"),
        ("generate -m here.gguf -f pipe", "pipe can be read by one process only, -sm graph has 2"),
        ("perplexity -m here.gguf -f latin.txt", "latin.txt, at byte 1: the text is not UTF-8"),
        ("perplexity -m here.gguf -f here.txt -ctv q8_0 -fa off", "flash_attn (-fa) is off"),
        ("generate -m here.gguf", "either -p PROMPT or -f FILE is needed"),
        ("generate -m here.gguf -p a -sys b", "-sys is for conversations"),
        ("generate -m here.gguf -p a -ncmoe -1", "n_cpu_moe (--n-cpu-moe)"),
        ("chat -m here.gguf -ub 9999999999", "ubatch (-ub) is 9999999999"),
        ("bench -m here.gguf -p 0 -n 0", "there is nothing to measure"),
        ("generate -m here.gguf -p a --prompt-cache x", "a prompt cache does not go together with"),
        (
            "imatrix -m here.gguf -f here.txt -o x -lsim -sm data",
            "-lsim is measured by one process",
        ),
        ("perplexity -m here.gguf -f here.txt --ppl-stride 8 -sm data", "--ppl-stride is measured"),
        (
            "perplexity -m here.gguf -f here.txt --hellaswag -sm data",
            "--hellaswag is measured by one process only: not with -sm data",
        ),
        (
            "perplexity -m here.gguf -f here.txt --kl-divergence-against here.gguf -sm data",
            "--kl-divergence-against is measured by one process only: not with -sm data",
        ),
    ],
)
def test_wrong_files_and_flags_are_found_before_ranks_start(
    words, said, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a text")
    (tmp_path / "latin.txt").write_bytes(b"a\xe4")
    (tmp_path / "here.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "part.safetensors").write_bytes(b"\0" * 8)
    monkeypatch.setattr(start_ranks, "run_ranks", lambda *args, **options: pytest.fail("started"))
    mode = [] if "-sm" in words else ["-sm", "graph"]
    assert main([*words.split(), "--device", "cpu", *mode, "-ts", "1,1"]) == 1
    assert said in capsys.readouterr().err

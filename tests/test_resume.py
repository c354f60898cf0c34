"""An interrupted quantization resumes with the same bytes and the same report, or says what has
changed.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import NonFiniteError, OutputError, ResumeError
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.quantize.run import resume
from iqforge.quantize.run.report import RunProgress
from iqforge.quantize.run.run_key import changes

from .broken_runs import LEFT, N_TENSORS, BreakAfter, break_off, imatrix, names, write_model


def test_another_type_names_both(model, tmp_path, capsys):
    """The message names the type of the unfinished file, and what to do."""
    out = tmp_path / "q.gguf"
    break_off(model, out, 5, type="IQ4_NL")
    assert main(["quantize", "--pure", str(model), str(out), "Q8_0"]) == 1
    said = capsys.readouterr().err
    assert "cannot resume the unfinished run with 5 of 12 tensors done" in said
    assert "the type was IQ4_NL, now Q8_0" in said
    assert "Run the same command as before to resume, or pass --restart" in said
    assert main(["quantize", "--pure", "--restart", str(model), str(out), "Q8_0"]) == 0
    assert names(tmp_path) == ["model.gguf", "q.gguf"]


def test_a_report_is_one_line(model, tmp_path):
    report = iqforge.quantize_model(model, tmp_path / "q.gguf", "Q8_0", pure=True)
    assert repr(report) == "RunReport(12 tensors, 768.00 KiB -> 204.00 KiB, 8.50 bits per weight)"
    plan = iqforge.quantize_model(model, None, "Q8_0", pure=True, dry_run=True, estimate=True)
    assert "dry run, estimated " in repr(plan) and "\n" not in repr(plan)


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model.gguf")


def test_resumes_to_the_same_file_and_report(model, tmp_path, caplog):
    expected = iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", pure=True)
    out = tmp_path / "q.gguf"
    with caplog.at_level("INFO"):
        break_off(model, out, 5)
        assert "5 of 12 tensors are kept" in caplog.text and not out.exists()
        break_off(model, out, 3)
        heard = BreakAfter(0)
        report = iqforge.quantize_model(model, out, "Q4_0", pure=True, progress=heard, threads=1)
    assert (
        "resuming after 5 of 12 tensors" in caplog.text
        and "resuming after 8 of 12 tensors" in caplog.text
    )
    assert (heard.resumed, heard.done) == (8, 4) and report == expected
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes() and names(tmp_path) == [
        "model.gguf",
        "q.gguf",
        "whole.gguf",
    ]


def test_nothing_is_left_before_the_first_tensor(model, tmp_path):
    class Refuses(RunProgress):
        def begin(self, planned):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, progress=Refuses())
    assert names(tmp_path) == ["model.gguf"]


def test_restart(model, tmp_path):
    break_off(model, tmp_path / "q.gguf", 5)
    heard = BreakAfter(0)
    iqforge.quantize_model(
        model, tmp_path / "q.gguf", "Q8_0", pure=True, progress=heard, restart=True
    )
    assert (heard.resumed, heard.done) == (0, N_TENSORS)
    break_off(model, tmp_path / "q.gguf", 5)
    (tmp_path / "q.gguf.part").unlink()  # by a user who wants to start from scratch
    assert main(["quantize", "--pure", str(model), str(tmp_path / "q.gguf"), "Q8_0"]) == 0
    assert names(tmp_path) == ["model.gguf", "q.gguf"]


def test_refusals_name_the_changes(model, tmp_path, monkeypatch):
    out = tmp_path / "q.gguf"
    break_off(model, out, 5, imatrix=imatrix(1))

    def refused(match: str, source: Path = model, type: str = "Q4_0", **options) -> None:
        options = {"imatrix": imatrix(1), "pure": True} | options
        before = {name: (tmp_path / name).read_bytes() for name in LEFT}
        with pytest.raises(ResumeError, match=f"5 of 12 tensors.*{match}.*--restart"):
            iqforge.quantize_model(source, out, type, **options)
        assert {name: (tmp_path / name).read_bytes() for name in LEFT} == before

    refused("the importance matrix has changed", imatrix=imatrix(2))
    refused("there was an importance matrix, now there is none", imatrix=None)
    refused(
        r"the type was Q4_0, now Q8_0 \(12 tensors have another type, first 'blk.0.ffn_up.weight'"
        r" from Q4_0 to Q8_0\)\. Run the same command as before to resume",
        type="Q8_0",
    )
    refused(
        "done: 1 tensor has another type, first 'blk.7.ffn_up.weight' from Q4_0 to F16",
        custom_q="blk.7=f16",
        pure=False,
    )
    refused("recipe was", ignore_imatrix_rules=True)
    refused("metadata", provenance=False)
    (tmp_path / "other").mkdir()
    refused("path of the source", source=write_model(tmp_path / "other/model.gguf"))
    with monkeypatch.context() as patched:
        patched.setattr("iqforge.api.outputs.__version__", "99")
        refused("version of iqforge")
        patched.setattr("iqforge.quantize.run.run_key.sources_digest", lambda: "abc")
        refused("digest of iqforge's sources")
    state, content = model.stat(), model.read_bytes()
    os.utime(model, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    refused("model.gguf was modified")
    write_model(model, seed=2)
    os.utime(model, ns=(state.st_atime_ns, state.st_mtime_ns))
    refused("values of the source")
    model.write_bytes(content)
    os.utime(model, ns=(state.st_atime_ns, state.st_mtime_ns))
    iqforge.quantize_model(model, out, "Q4_0", imatrix(1), pure=True)
    iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", imatrix(1), pure=True)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_nan_to_zero_may_be_added(tmp_path):
    model = write_model(tmp_path / "model.gguf", t7=np.nan)
    with pytest.raises(NonFiniteError, match="blk.7"):
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)
    assert names(tmp_path) == LEFT
    heard = BreakAfter(3)
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_model(
            model, tmp_path / "q.gguf", "Q4_0", pure=True, nan_to_zero=True, progress=heard
        )
    assert heard.resumed == 7
    with pytest.raises(ResumeError, match="nan-to-zero was given"):
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)
    report = iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, nan_to_zero=True)
    expected = iqforge.quantize_model(
        model, tmp_path / "whole.gguf", "Q4_0", pure=True, nan_to_zero=True
    )
    assert (
        report == expected
        and (tmp_path / "q.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    )


@pytest.mark.parametrize(
    "damage",
    [
        "torn line",
        "changed line",
        "cut part",
        "changed part",
        "changed header",
        "garbage after",
        "empty journal",
    ],
)
def test_damage_costs_only_the_damaged_tensors(model, tmp_path, damage):
    expected = iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", pure=True)
    out, part, journal = (tmp_path / name for name in ("q.gguf", "q.gguf.part", "q.gguf.journal"))
    break_off(model, out, 6)
    data, lines = bytearray(part.read_bytes()), journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    tensor = 64 * 144
    left = {
        "torn line": 5,
        "changed line": 3,
        "cut part": 5,
        "changed part": 2,
        "changed header": 0,
        "garbage after": 6,
        "empty journal": 0,
    }
    if damage == "torn line":
        journal.write_bytes(b"".join(lines)[:-20])
    elif damage == "changed line":
        lines[4] = lines[4].replace(b"zeroed", b"seroed")
        journal.write_bytes(b"".join(lines))
    elif damage == "cut part":
        part.write_bytes(data[:-100])
    elif damage == "changed part":
        data[len(data) - 4 * tensor + 7] ^= 1
        part.write_bytes(data)
    elif damage == "changed header":
        data[30] ^= 1
        part.write_bytes(data)
    elif damage == "garbage after":
        part.write_bytes(data + bytes(5000))
        journal.write_bytes(b"".join(lines) + b'0123456789abcdef {"tensor":')
    else:
        journal.write_bytes(b"")
    heard = BreakAfter(0)
    assert iqforge.quantize_model(model, out, "Q4_0", pure=True, progress=heard) == expected
    assert heard.done == N_TENSORS - left[damage]
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes() and names(tmp_path) == [
        "model.gguf",
        "q.gguf",
        "whole.gguf",
    ]


def test_full_disk_leaves_finished_tensors(model, tmp_path, monkeypatch):
    expected = iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", pure=True)
    real_write, left = os.write, [40_000]

    def filling(fd, data):
        if len(data) < 1000:
            return real_write(fd, data)
        data = memoryview(data)[: left[0]]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return real_write(fd, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", filling)
        with pytest.raises(OutputError, match="No space left"):
            iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)
    assert names(tmp_path) == [*LEFT, "whole.gguf"]
    heard = BreakAfter(0)
    assert (
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, progress=heard)
        == expected
    )
    assert (
        heard.resumed == 40_000 // (64 * 144)
        and (tmp_path / "q.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    )


def test_several_outputs_go_on_together(model, tmp_path):
    wanted = [(tmp_path / "a.gguf", "Q4_0"), (tmp_path / "b.gguf", "Q8_0")]
    alone = [
        iqforge.quantize_model(model, tmp_path / f"{type}.gguf", type, pure=True)
        for _, type in wanted
    ]
    with pytest.raises(KeyboardInterrupt):
        iqforge.quantize_models(model, wanted, pure=True, progress=[RunProgress(), BreakAfter(5)])
    break_off(model, tmp_path / "a.gguf", 3)  # alone, and further
    heard = BreakAfter(0), BreakAfter(0)
    assert iqforge.quantize_models(model, wanted, pure=True, progress=heard) == alone
    assert [one.resumed for one in heard] == [8, 5] and [one.done for one in heard] == [4, 7]
    for out, type in wanted:
        assert out.read_bytes() == (tmp_path / f"{type}.gguf").read_bytes()


@pytest.mark.parametrize("at", ["first name", "second name", "journal"])
def test_killed_while_names_are_given(model, tmp_path, monkeypatch, at):
    wanted = [(tmp_path / "a.gguf", "Q4_0"), (tmp_path / "b.gguf", "Q8_0")]
    expected = [iqforge.quantize_model(model, out, type, pure=True) for out, type in wanted]
    content = [out.read_bytes() for out, _ in wanted]
    function = "_forget" if at == "journal" else "_commit"
    real, calls = getattr(resume.ResumableOutput, function), [0 if at == "second name" else 1]

    class Killed(BaseException):
        pass

    def killing(self):
        if calls[0]:
            raise Killed
        calls[0] += 1
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(resume.ResumableOutput, function, killing)
        patched.setattr(resume.ResumableOutput, "leave", lambda self: self._journal.close())
        # A killed process removes nothing.
        patched.setattr(GGUFWriter, "abort", GGUFWriter.leave)
        with pytest.raises(Killed):
            iqforge.quantize_models(model, wanted, pure=True)
    heard = BreakAfter(0), BreakAfter(0)
    assert iqforge.quantize_models(model, wanted, pure=True, progress=heard) == expected
    assert [one.done for one in heard] == [0, 0] and [
        out.read_bytes() for out, _ in wanted
    ] == content
    assert names(tmp_path) == ["a.gguf", "b.gguf", "model.gguf"]


def test_two_runs_at_once(model, tmp_path):
    class Second(RunProgress):
        def begin(self, planned):
            with pytest.raises(OutputError, match="another process"):
                iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)

    iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, progress=Second())
    assert names(tmp_path) == ["model.gguf", "q.gguf"]


# ---- SIGKILL

KILLS = 20
SERVER = """
import os, sys, traceback, iqforge
from iqforge.quantize.run import resume
resume.CHECKPOINT_SECONDS = 0.0
iqforge.quantize_model({model!r}, {warm!r}, "Q4_K", pure=True, threads=2)
while runs.recv():
    pid = os.fork()
    if pid == 0:
        try:
            iqforge.quantize_model({model!r}, {out!r}, "Q4_K", pure=True, threads=2)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    runs.send(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    runs.send("ended")  # its number is not given to another process yet
    runs.recv()
    runs.send(os.waitpid(pid, 0)[1])
"""


def test_killed_at_random_moments(tmp_path):
    """Each of twenty runs is killed. It resumes what the previous one left, or starts from scratch
    after a run that was not killed in time.

    The runs are forks of a process that has loaded the compiled code, so that they are killed at
    work and not while they start.
    """
    model, out = write_model(tmp_path / "model.gguf", n_tensors=40, rows=512), tmp_path / "q.gguf"
    whole_file, journal = tmp_path / "whole.gguf", tmp_path / "q.gguf.journal"
    context = multiprocessing.get_context("forkserver")
    runs, other_end = context.Pipe()
    code = SERVER.format(model=str(model), warm=str(whole_file), out=str(out))
    server = context.Process(target=exec, args=(code, {"runs": other_end}), daemon=True)
    server.start()

    def run(seconds: float | None) -> tuple[int, float]:
        """Return the wait status of a run that is killed after `seconds`, and its time."""
        runs.send(True)
        pid, started = runs.recv(), time.monotonic()
        if not runs.poll(seconds):
            os.kill(pid, signal.SIGKILL)
        assert runs.recv() == "ended"
        lasted = time.monotonic() - started
        runs.send(True)
        return runs.recv(), lasted

    whole = min(run(None)[1] for _ in range(2))
    expected = whole_file.read_bytes()
    assert out.read_bytes() == expected
    out.unlink()
    chance, killed, went_on, most = random.Random(7), 0, 0, KILLS // 3
    for _ in range(20 * KILLS):
        if killed >= KILLS and went_on > most:
            break
        goes_on = journal.exists() and len(journal.read_bytes().splitlines()) > 2
        went_on += goes_on
        status, lasted = run(chance.uniform(0, 0.7) * whole)
        if status == 0:
            assert out.read_bytes() == expected and not journal.exists()
            out.unlink()
            if not goes_on:  # the machine may be less busy than it was
                whole = min(whole, lasted)
            continue
        if not journal.exists():  # or busier
            whole *= 1.1
        assert status == signal.SIGKILL
        assert not out.exists() or out.read_bytes() == expected  # killed when it had its name
        killed += 1
    assert killed >= KILLS and went_on > most and run(None)[0] == 0
    assert out.read_bytes() == expected and names(tmp_path) == [
        "model.gguf",
        "q.gguf",
        "whole.gguf",
    ]
    runs.send(False)
    server.join()


def test_what_follows_from_another_difference_is_not_named():
    before = {
        "iqforge": "1",
        "searches": "a",
        "source": "/m/a.gguf",
        "source files": {"a.gguf": [10, 1]},
        "source values": "x",
        "recipe": "{}",
        "device": "cpu",
        "tensors": [["w", 1, 4, "F32", "IQ4_KT"]],
    }
    now = before | {"imatrix": None, "nan_to_zero": False, "files": None, "header": None}
    other = {"source": "/m/b.gguf", "source files": {"b.gguf": [9, 2]}, "source values": "y"}
    assert changes(before, now | other) == ["the path of the source was /m/a.gguf, now /m/b.gguf"]
    plain = {"device": "any", "tensors": [["w", 1, 4, "F32", "Q8_0"]]}
    [only] = changes(before, now | plain)
    assert "device" not in only and "IQ4_KT" in only and "Q8_0" in only
    assert changes(before, now | {"device": "gpu"}) == [
        "the device of trellis types was cpu, now gpu"
    ]

"""A failed run loses nothing: finished tensors, input files, space on the disk."""

from __future__ import annotations

import gc
import shutil

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import OutputError
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.run import resume, scratch_file

from .broken_runs import LEFT, BreakAfter, break_off, imatrix, names, write_model


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model.gguf")


def test_a_second_interruption_keeps_finished_tensors(model, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resume, "CHECKPOINT_SECONDS", 0.0)
        patched.setattr(GGUFWriter, "cut", interrupted)  # while the first one is answered
        break_off(model, tmp_path / "q.gguf", 9)
        gc.collect()
    assert names(tmp_path) == LEFT
    heard = BreakAfter(0)
    iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, progress=heard)
    iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", pure=True)
    assert (
        heard.resumed > 0
        and (tmp_path / "q.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    )


@pytest.mark.parametrize("part_is_gone", [True, False])
def test_an_older_output_stays_until_there_is_a_new_one(model, tmp_path, monkeypatch, part_is_gone):
    """It also stays if the earlier run was about to rename the new one, and the user has removed
    its files.
    """
    out = tmp_path / "q.gguf"
    iqforge.quantize_model(model, out, "Q8_0", pure=True)
    older = out.read_bytes()

    def failing(self):
        raise OutputError("cannot be renamed", file=self.out)

    with monkeypatch.context() as patched:
        patched.setattr(resume.ResumableOutput, "_commit", failing)
        with pytest.raises(OutputError, match="renamed"):
            iqforge.quantize_model(model, out, "Q4_0", pure=True)
    assert (
        names(tmp_path) == ["model.gguf", "q.gguf", "q.gguf.journal", "q.gguf.part"]
        and out.read_bytes() == older
    )
    if part_is_gone:
        (tmp_path / "q.gguf.part").unlink()
        break_off(model, out, 3)
        assert out.read_bytes() == older
    iqforge.quantize_model(model, out, "Q4_0", pure=True)
    iqforge.quantize_model(model, tmp_path / "whole.gguf", "Q4_0", pure=True)
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes() and names(tmp_path) == [
        "model.gguf",
        "q.gguf",
        "whole.gguf",
    ]


def test_unsynced_data_is_not_entered(model, tmp_path, monkeypatch):
    """After an error the system regards the data as written, so a second sync does not report
    it.
    """
    real, calls = GGUFWriter.sync, [0]

    def failing(self):
        calls[0] += 1
        if calls[0] == 2:
            raise OutputError("cannot be written: Input/output error", file=self.path)
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(resume, "CHECKPOINT_SECONDS", 0.0)
        patched.setattr(GGUFWriter, "sync", failing)
        with pytest.raises(OutputError, match="Input/output"):
            iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)
    assert calls[0] == 2 and names(tmp_path) == LEFT
    heard = BreakAfter(0)
    iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, progress=heard)
    assert 0 < heard.resumed < 12


@pytest.mark.parametrize("flag", ["--recipe", "--tensor-type-file", "--plan", "--imatrix"])
def test_files_that_are_read_are_not_replaced(model, tmp_path, capsys, flag):
    read, out = tmp_path / "read", tmp_path / "q.gguf"
    if flag == "--plan":
        iqforge.quantize_model(model, out, "Q4_0", pure=True, save_plan=read)
    elif flag == "--imatrix":
        iqforge.merge_imatrices([imatrix(1)], read)
    else:
        read.write_text("ffn_up=q8_0")
    before, words = read.read_bytes(), [str(model)]
    for output, more in ((read, []), (out, ["--save-plan", str(read)])):
        assert main(["quantize", flag, str(read), *more, *words, str(output), "Q4_0"]) == 1
        assert (
            "is the same file as the input" in capsys.readouterr().err
            and read.read_bytes() == before
        )


@pytest.mark.parametrize("content", [b"notes of mine, not of a run", b"\x00\x01\x02"])
def test_a_file_in_the_way_of_the_journal_stays(model, tmp_path, content):
    (tmp_path / "q.gguf.journal").write_bytes(content)
    for restart in (False, True):
        with pytest.raises(OutputError, match="is not a journal; move or delete it"):
            iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True, restart=restart)
    assert (tmp_path / "q.gguf.journal").read_bytes() == content and names(tmp_path) == [
        "model.gguf",
        "q.gguf.journal",
    ]
    for torn in (b"0123456789abcdef {", b"01234", bytes(100)):
        (tmp_path / "q.gguf.journal").write_bytes(torn)
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", pure=True)
        assert names(tmp_path) == ["model.gguf", "q.gguf"]


def test_a_plan_and_an_output_are_two_files(model, tmp_path):
    with pytest.raises(iqforge.IqforgeError, match="both the output and the plan"):
        iqforge.quantize_model(model, tmp_path / "q.gguf", "Q4_0", save_plan=tmp_path / "q.gguf")
    assert names(tmp_path) == ["model.gguf"]


def test_a_trial_leaves_space_on_the_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000)
    monkeypatch.setattr(scratch_file.shutil, "disk_usage", lambda folder: usage)
    tensor, sizes = TensorInfo("t", (300, 256), ggml_type("F32")), []
    with scratch_file.ScratchFile(str(tmp_path)) as sink:
        real = sink._file

        class Measured:
            def write(self, data):
                done = real.write(data)
                sizes.append(real.tell())
                return done

            def __getattr__(self, name):
                return getattr(real, name)

        sink._file = Measured()
        for _ in range(5):
            sink.write(tensor, np.zeros(70_000, np.uint8))
        sink.write(tensor, np.zeros(300_000, np.uint8))
        assert sink.seconds_for(1 << 30)[0] > 0
    assert max(sizes) == 100_000 and len(sink.written_at) == 6


def test_a_size_counts_the_keys_of_changes(model, tmp_path):
    changes = iqforge.Changes(
        override_kv=[f"some.key.{number}=str:{'long' * 20}" for number in range(20)]
    )
    for target in (180_000, 140_000):
        fitted = iqforge.recipe_for_target(
            model, size=target, types=["Q4_0", "Q5_0", "Q8_0"], changes=changes
        )
        iqforge.quantize_model(model, tmp_path / "q.gguf", fitted.recipe, changes=changes)
        assert (tmp_path / "q.gguf").stat().st_size <= target

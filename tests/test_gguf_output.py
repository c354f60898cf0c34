"""Outputs under bad conditions: full or read-only disks, two processes, Ctrl-C, kill -9, output =
input.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from iqforge.errors import OutputError, printable
from iqforge.formats import disk, output
from iqforge.formats.gguf.reader import open_gguf
from iqforge.formats.gguf.sharded_writer import ShardedWriter
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.output import PartFile, refuse_same_file
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type

from .ggufbuild import small
from .two_tensors import METADATA, TENSORS, write


def test_two_writers_on_one_output(tmp_path):
    with (
        GGUFWriter(tmp_path / "m.gguf", METADATA, []),
        pytest.raises(OutputError, match="another process is writing"),
    ):
        GGUFWriter(tmp_path / "m.gguf", METADATA, [])
    open_gguf(tmp_path / "m.gguf").close()


def test_stale_part_is_overwritten(tmp_path):
    (tmp_path / "m.gguf.part").write_bytes(b"x" * 10_000)
    write(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == small() and os.listdir(tmp_path) == ["m.gguf"]


def test_output_through_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "m.gguf").symlink_to("disk/m.gguf")
    write(tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").is_symlink() and (tmp_path / "disk/m.gguf").read_bytes() == small()


def test_outputs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    impossible = [
        tmp_path / "file/m.gguf",
        tmp_path / "absent/m.gguf",
        tmp_path,
        "/dev/null",
        tmp_path / ("n" * 300),
        "a\0b",
    ]
    if os.path.isdir("/proc/self"):
        impossible.append("/proc/iqforge.gguf")  # read-only for root too
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        impossible.append(tmp_path / "locked/m.gguf")
    for path in impossible:
        with pytest.raises(OutputError) as caught:
            write(path)
        assert printable(path, 400) in str(caught.value)
    assert not os.path.isfile("/dev/null")
    with pytest.raises(OutputError, match="^the name of the output is empty$"):
        write("")


def test_too_little_space_is_known_before(tmp_path, monkeypatch):
    usage = type(disk.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    for attempt in (
        lambda: GGUFWriter(tmp_path / "m.gguf", METADATA, TENSORS),
        lambda: ShardedWriter(tmp_path / "m", METADATA, TENSORS, [TENSORS]),
    ):
        with pytest.raises(OutputError, match="needs [0-9]+ bytes, 100 are free"):
            attempt()
        assert os.listdir(tmp_path) == []


def test_disk_full_in_mid_write(tmp_path, monkeypatch):
    real_write, left = os.write, [200]

    def filling(fd, data):
        data = memoryview(data)[: left[0]]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return real_write(fd, data)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(OutputError, match="m.gguf.*No space left.*200 of 288 bytes are written"):
        write(tmp_path / "m.gguf")
    assert os.listdir(tmp_path) == []


_CHILD = """
import resource, sys, time
import numpy as np
from iqforge.errors import OutputError
from iqforge.formats.values import string
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.gguf.sharded_writer import ShardedWriter
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
kind, path, stop, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
tensors = [TensorInfo(f"t{i}", (64, 4096), ggml_type("F32")) for i in range(4)]
metadata = {"general.architecture": string("llama")}
try:
    if kind == "one":
        opened = GGUFWriter(path, metadata, tensors)
    else:
        opened = ShardedWriter(path, metadata, tensors, [[t] for t in tensors])
    with opened as sink:
        for tensor in tensors:
            for _ in range(4):
                sink.write(tensor, np.ones((16, 4096), np.float32))
                print("wrote", flush=True)
                stop -= 1
                if not stop:
                    time.sleep(600)
except OutputError as error:
    print("refused", error)
"""


def _child(kind: str, path: Path, stop: int = 0, limit: int = 0) -> subprocess.Popen:
    """Start a process that writes; it waits after so many writes, if this is not 0."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, kind, str(path), str(stop), str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kind", ["one", "shards"])
def test_file_size_limit(tmp_path, kind):
    """The kernel itself refuses a write in the middle of a tensor."""
    child = _child(kind, tmp_path / "m.gguf", limit=600_000)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0 and "Traceback" not in err
    assert (
        "refused" in out and "m.gguf" in out and "too large" in out and "bytes are written" in out
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["one", "shards"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_in_mid_write(tmp_path, kind, number):
    child = _child(kind, tmp_path / "m.gguf", stop=6)
    for _ in range(6):  # into the second tensor, which is the second shard
        assert child.stdout.readline() == "wrote\n"
    child.send_signal(number)
    child.communicate(timeout=300)
    left = os.listdir(tmp_path)
    assert child.returncode != 0
    assert (
        left == []
        if number == signal.SIGINT
        else left and all(name.endswith(".part") for name in left)
    )
    again = _child(kind, tmp_path / "m.gguf")
    again.communicate(timeout=300)
    assert again.returncode == 0
    names = ["m.gguf"] if kind == "one" else [f"m.gguf-0000{i}-of-00004.gguf" for i in range(1, 5)]
    assert sorted(os.listdir(tmp_path)) == names
    open_gguf(tmp_path / names[0]).close()


def test_really_full_disk(tmp_path, monkeypatch):
    """The disk is a tmpfs of 1 MiB, where the machine lets us mount one."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        tensors = [TensorInfo("t", (1024, 512), ggml_type("F32"))]
        with pytest.raises(OutputError, match="needs 209[0-9]+ bytes, [0-9]+ are free"):
            GGUFWriter(tmp_path / "m.gguf", METADATA, tensors)
        monkeypatch.setattr(output, "check_space", lambda *_: None)
        with (
            pytest.raises(OutputError, match="No space left"),
            GGUFWriter(tmp_path / "m.gguf", METADATA, tensors) as writer,
        ):
            writer.write(tensors[0], np.zeros((1024, 512), np.float32))
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_refuse_same_file(tmp_path):
    source = tmp_path / "in.gguf"
    source.write_bytes(small())
    (tmp_path / "link.gguf").symlink_to(source)
    os.link(source, tmp_path / "hard.gguf")
    for name in ("in.gguf", "link.gguf", "hard.gguf", "../" + tmp_path.name + "/in.gguf"):
        with pytest.raises(OutputError, match="same file as the input"):
            refuse_same_file(tmp_path / name, [tmp_path / "absent", source])
    refuse_same_file(tmp_path / "out.gguf", [source])


def test_part_file_serves_other_formats(tmp_path):
    with PartFile(tmp_path / "report.html") as part:
        part.write(b"")
        part.write(b"<html>")
        assert os.listdir(tmp_path) == ["report.html.part"]
    assert (tmp_path / "report.html").read_bytes() == b"<html>"

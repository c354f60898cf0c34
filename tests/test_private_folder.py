"""Compiled code when neither the package nor the home folder can be written."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from iqforge.cuda_kernels.compile.nvrtc import cache_folder
from iqforge.formats import private_folder as module
from iqforge.formats.gguf.writer import GGUFWriter
from iqforge.formats.private_folder import can_be_written, private_folder
from iqforge.formats.source import TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.formats.values import string

ROOT = Path(module.__file__).resolve().parents[1]
NOWHERE = "/dev/null/home"  # cannot be made, not even by root


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private_folder.cache_clear()
    yield tmp_path
    private_folder.cache_clear()


def unwritable_package(folder: Path) -> Path:
    """Make a copy of the package that cannot hold compiled code for any user, as a file has the
    name of each cache folder. Return the folder for Python's path.
    """
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "build", "*.egg-info")
    copy = shutil.copytree(ROOT, folder / "site" / "iqforge", ignore=ignored)
    for place in [copy, *(p for p in copy.rglob("*") if p.is_dir())]:
        (place / "__pycache__").write_text("")
    return copy.parent


def test_a_command_without_a_writable_home_or_package(tmp_path):
    site, scratch = unwritable_package(tmp_path), tmp_path / "tmp"
    scratch.mkdir()
    tensor = TensorInfo("blk.0.ffn_up.weight", (4, 256), ggml_type("F32"))
    with GGUFWriter(
        tmp_path / "m.gguf", {"general.architecture": string("llama")}, [tensor]
    ) as sink:
        sink.write(tensor, np.ones((4, 256), np.float32))
    dropped = ("XDG_CACHE_HOME", "IQFORGE_CACHE_DIR", "NUMBA_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"HOME": NOWHERE, "PYTHONPATH": str(site), "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "iqforge", "quantize", "--pure", "m.gguf", "q.gguf", "Q8_0"]

    def run() -> tuple[str, set[Path]]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("cannot be written") == 1
        return done.stderr, set(scratch.rglob("*.nbc"))

    text, compiled = run()
    private = scratch / f"iqforge-{os.geteuid()}"
    assert str(private) in text and compiled
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    os.unlink(tmp_path / "q.gguf")
    assert run()[1] == compiled  # the second run found them


NO_HOME = """
import os, pwd
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
del os.environ["HOME"]
import numpy as np, iqforge
assert os.path.expanduser("~") == "~"
iqforge.decode("Q8_0", np.zeros((1, 34), np.uint8), 32)
"""


def test_a_user_without_a_home_folder(tmp_path):
    """A container may run with a user id without an account. No folder named "~" is made."""
    site, scratch, here = (tmp_path / name for name in ("site", "tmp", "here"))
    unwritable_package(tmp_path)
    scratch.mkdir()
    here.mkdir()
    dropped = ("XDG_CACHE_HOME", "IQFORGE_CACHE_DIR", "NUMBA_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"PYTHONPATH": str(site), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", NO_HOME]
    done = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert not list(here.iterdir()) and list(scratch.rglob("*.nbc"))


def test_kernels_go_there_too(temporary, monkeypatch, caplog):
    monkeypatch.delenv("IQFORGE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(temporary / "home"))
    assert cache_folder() == temporary / "home/.cache/iqforge/kernels"
    monkeypatch.setenv("HOME", NOWHERE)
    for _ in range(3):
        assert cache_folder() == temporary / f"iqforge-{os.geteuid()}/kernels"
    assert caplog.text.count("cannot be written") == 1
    monkeypatch.setenv("IQFORGE_CACHE_DIR", "/chosen")
    assert cache_folder() == Path("/chosen/kernels")


@pytest.mark.parametrize("kind", ["file", "link", "open to others"])
def test_a_folder_that_is_not_private_is_not_used(temporary, caplog, kind):
    taken = temporary / f"iqforge-{os.geteuid()}"
    if kind == "file":
        taken.write_text("")
    elif kind == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(temporary / "elsewhere")
    else:
        taken.mkdir()
        taken.chmod(0o755)
    folder = private_folder()
    assert folder.parent == temporary and folder != taken and not folder.is_symlink()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "is not a private folder" in caplog.text and private_folder() == folder


def test_a_folder_of_another_user_is_not_used(temporary, monkeypatch):
    taken = temporary / "iqforge-4711"
    taken.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert private_folder() != taken


def test_what_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert can_be_written(tmp_path) and can_be_written(tmp_path / "new/folder")
    assert not can_be_written(tmp_path / "file/folder") and not can_be_written(Path(NOWHERE))
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]

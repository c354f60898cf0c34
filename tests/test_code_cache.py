"""Several processes that compile a function at the same time share one cache of its code."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import iqforge
import numba
import numpy as np
import pytest
from iqforge.formats.kernel import (
    CompiledLoop,
    device_function,
    locked,
    share_between_processes,
)
from numba.core.caching import IndexDataCacheFile

PROCESSES, ENTRIES = 4, 40


def files_of(folder: Path, stamp: str = "the sources", shared: bool = True) -> Any:
    """What one process uses to read and write the files of a function's code."""
    cache = SimpleNamespace(_cache_file=IndexDataCacheFile(str(folder), "f-1.py311", stamp))
    if shared:
        share_between_processes(cache)
    return cache._cache_file


def save_many(arguments: tuple[Path, int]) -> None:
    folder, process = arguments
    files = files_of(folder)
    for number in range(ENTRIES):
        files.save((process, number), f"code {process} {number}")


def saved_at_the_same_time(folder: Path) -> list[tuple[Any, str]]:
    """Return what is loaded for each key after all processes have saved, and what they saved."""
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        pool.map(save_many, [(folder, i) for i in range(PROCESSES)], chunksize=1)
    files = files_of(folder)
    keys = [(process, number) for process in range(PROCESSES) for number in range(ENTRIES)]
    return [(files.load(key), f"code {key[0]} {key[1]}") for key in keys]


def refuse_locks(monkeypatch, number: int) -> None:
    def refuses(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)


def test_every_process_finds_its_own_code(tmp_path):
    assert all(found == saved for found, saved in saved_at_the_same_time(tmp_path))


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Entries may be lost from the index; their code is compiled again."""
    refuse_locks(monkeypatch, errno.ENOSYS)
    found = saved_at_the_same_time(tmp_path)
    assert any(one is not None for one, _ in found)
    assert all(one in (None, saved) for one, saved in found)


def test_a_lock_that_fails_is_an_error(tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("shared", [True, False])
def test_a_save_within_another_one(tmp_path, monkeypatch, shared):
    """Two processes have read the index before one saves while the other does: numba's own names of
    files are mixed up (shared=False), which is why the names are ours.
    """
    refuse_locks(monkeypatch, errno.ENOSYS)
    one, other = files_of(tmp_path, shared=shared), files_of(tmp_path, shared=shared)
    monkeypatch.setattr(other, "_load_index", dict)
    save_data = one._save_data

    def save_within(name, data):
        other.save("other types", "other code")
        save_data(name, data)

    monkeypatch.setattr(one, "_save_data", save_within)
    one.save("types", "code")
    assert files_of(tmp_path).load("other types") == ("other code" if shared else "code")


def test_data_is_there_before_the_index_names_it(tmp_path, monkeypatch):
    files = files_of(tmp_path)

    def ends(overloads):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "_save_index", ends)
    with pytest.raises(KeyboardInterrupt):
        files.save("types", "code")
    assert len(list(tmp_path.glob("*.nbc"))) == 1
    assert files_of(tmp_path).load("types") is None


def test_code_of_other_sources_is_not_loaded(tmp_path):
    files_of(tmp_path, "old sources").save("types", "old code")
    files = files_of(tmp_path, "new sources")
    assert files.load("types") is None
    files.save("types", "new code")
    assert files.load("types") == "new code"


def added(x, y):
    for i in range(len(x)):
        x[i] += y[i]


def test_loops_use_it(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    for dtype in (np.float32, np.float64):
        x = np.ones(3, dtype)
        CompiledLoop(added)(x, x.copy())
        assert x.tolist() == [2, 2, 2] and x.dtype == dtype
    numbers = [path.name.split(".")[-2] for path in tmp_path.rglob("*.nbc")]
    assert len(numbers) == 2 and not {"1", "2"} & set(numbers)
    again = CompiledLoop(added)
    again(x, x.copy())
    assert again._dispatcher.stats.cache_hits


def test_calls_with_different_constants_share_code(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))

    @device_function
    def add(x, number):
        x[0] += number

    def add_some(x):
        add(x, 1)
        add(x, 2)

    x = np.zeros(1)
    CompiledLoop(add_some)(x)
    assert x[0] == 3 and len(add.overloads) == 1
    assert gc.isenabled()  # it is off while code is compiled


UNCOMPILED = """
import numpy as np
from iqforge.formats.codecs.codec import decode
from iqforge.formats.types import ggml_type
block = np.array([[0, 0x3C] + [0x98] * 16], np.uint8)
print(decode(ggml_type("Q4_0"), block, 32).tolist())
"""


def test_functions_run_uncompiled_for_debuggers():
    paths = [str(Path(iqforge.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", UNCOMPILED],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{[[0.0] * 16 + [1.0] * 16]}\n", done.stderr

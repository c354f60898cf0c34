"""Processes that compile the same function at a time share one cache of code."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
from pathlib import Path

import numba
import numpy as np
import pytest
from iqforge.formats.kernel import CompiledLoop, share_between_processes
from numba.core.caching import IndexDataCacheFile


class Cache:
    """What a function's cache holds of files."""

    def __init__(self, folder: Path, shared: bool = True):
        self._cache_file = IndexDataCacheFile(str(folder), "f-1.py311", "the sources")
        if shared:
            share_between_processes(self)

    def __getattr__(self, name):
        return getattr(self._cache_file, name)


def save_many(arguments: tuple[Path, bool, int]) -> None:
    folder, shared, process = arguments
    cache = Cache(folder, shared)
    for number in range(40):
        key = (process, number)
        cache.save(key, key)


def found_by_later_processes(folder: Path, shared: bool) -> list[tuple]:
    """Let four processes save 40 entries each at a time; return each key with what it gives."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(save_many, [(folder, shared, i) for i in range(4)], chunksize=1)
    cache = Cache(folder, shared)
    keys = [(process, number) for process in range(4) for number in range(40)]
    return [(key, cache.load(key)) for key in keys]


def test_every_process_finds_its_own_code(tmp_path):
    assert all(key == found for key, found in found_by_later_processes(tmp_path, shared=True))


@pytest.mark.full
def test_numbered_files_would_be_mixed_up(tmp_path):
    found = found_by_later_processes(tmp_path, shared=False)
    assert any(entry is not None and entry != key for key, entry in found)


def test_data_is_there_before_the_index_says_so(tmp_path, monkeypatch):
    cache = Cache(tmp_path)

    def ends(overloads):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._cache_file, "_save_index", ends)
    with pytest.raises(KeyboardInterrupt):
        cache.save("key", "code")
    assert Cache(tmp_path).load("key") is None


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuses(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert all(key == (found or key) for key, found in found_by_later_processes(tmp_path, True))
    cache = Cache(tmp_path)
    cache.save("key", "code")
    assert cache.load("key") == "code"


def test_code_of_other_sources_is_not_loaded(tmp_path):
    cache = Cache(tmp_path)
    cache.save("key", "old code")
    cache._cache_file._source_stamp = "newer sources"
    assert cache.load("key") is None
    cache.save("key", "new code")
    assert cache.load("key") == "new code"


def added(x, y):
    for i in range(len(x)):
        x[i] += y[i]


def test_loops_use_it(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    for dtype in (np.float32, np.float64):
        x = np.ones(3, dtype)
        CompiledLoop(added)(x, x.copy())
        assert x.tolist() == [2, 2, 2] and x.dtype == dtype
    names = [path.name for path in tmp_path.rglob("*.nbc")]
    assert len(names) == 2 and len({name.split(".")[-2] for name in names}) == 2
    assert not [name for name in names if name.split(".")[-2] in ("1", "2")]
    again = CompiledLoop(added)
    again(x, x.copy())
    assert again._dispatcher.stats.cache_hits

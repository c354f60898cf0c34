"""Keep the machine code of compiled functions on disk.

It lies beside the module that holds the function, else in numba's user cache, else in a private
folder under the temporary directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..output import lock_file
from ..private_folder import can_be_written, private_folder


@functools.cache
def sources_digest() -> str:
    """Digest of every source file that compiled functions come from.

    numba's cache notices a change of the file that holds a function, but not of a helper or a
    constant in another file; with the digest in the name of each cached function, machine code of
    older sources is never used.
    """
    package = Path(__file__).resolve().parent.parent.parent
    files = sorted(
        f
        for folder in (
            "formats",
            "formats/codecs",
            "formats/kernel",
            "quantize/search",
            "quantize/search/grids",
            "quantize/search/trellis",
            "quantize/rounding",
            "quantize/rounding/kernels",
            "quantize/rounding/layouts",
        )
        for f in (package / folder).glob("*.py")
    )
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


def share_between_processes(cache: Any) -> None:
    """Make a function's `cache`, of numba or numba-cuda, safe for several processes that write to
    it at the same time.

    numba numbers the files of a function's code and lists them in an index. Two processes that
    compile the function for different types at the same time may both take the next number. One
    then overwrites the other's file, and later processes load that code for the wrong types.
    """
    files = cache._cache_file
    files.__class__ = _shared(type(files))


def is_cached(cache: Any, types: Any, target: Any) -> bool:
    """Return whether a function's code for these types and this target context is on disk."""
    files = cache._cache_file
    index = files._load_index()  # empty for other sources or another numba
    name = index.get(cache._index_key(types, target.codegen()))
    return name is not None and Path(files._data_path(name)).exists()


@functools.cache
def _shared(base: Any) -> type:
    class SharedFiles(base):
        """The files of one function's code, named after the types that they are compiled for."""

        def save(self, key: Any, data: Any) -> None:
            digest = hashlib.sha256(self._dump(key)).hexdigest()[:16]
            name = f"{self._index_name.removesuffix('.nbi')}.{digest}.nbc"
            with locked(Path(self._cache_path) / "iqforge.lock"):
                self._save_data(name, data)  # before the index names it
                self._save_index(self._load_index() | {key: name})

    return SharedFiles


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is created if needed, until the block or the process ends.
    Raise OSError if it cannot be created.

    On a file system without locks (Lustre without `-o flock`) no process waits. Then several may
    compile the same code; each replaces whole files, so what is read is still complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        lock_file(file.fileno(), wait=True)
        yield


_fallback_lock = threading.Lock()  # numba's setting is one for the process


def cached(compile_: Callable[[Callable], Any], function: Callable) -> Any:
    """Return `compile_(function)`, with numba's cache in a private folder if none of the usual
    folders can be written.
    """
    import numba.core.config

    settings: Any = numba.core.config
    if not _without_any_folder(function, settings.CACHE_DIR):
        try:
            return compile_(function)
        except RuntimeError:  # neither the module's folder nor the user's cache can be written
            pass
    with _fallback_lock:
        chosen = settings.CACHE_DIR
        settings.CACHE_DIR = str(private_folder() / "numba")
        try:
            return compile_(function)
        finally:
            settings.CACHE_DIR = chosen


def _without_any_folder(function: Callable, chosen: str) -> bool:
    """Return whether the user's cache is the place for code, but there is no home folder: numba
    would create one named "~" where the command runs.
    """
    if chosen or os.environ.get("XDG_CACHE_HOME") or os.path.isabs(os.path.expanduser("~")):
        return False
    return not can_be_written(Path(function.__code__.co_filename).parent / "__pycache__")

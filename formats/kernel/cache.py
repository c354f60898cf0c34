"""Keep the machine code of compiled functions on disk.

It lies beside the module that holds the function, else in numba's user cache, else in a private
folder under the temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..private_folder import can_be_written, private_folder

log = logging.getLogger(__name__)


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
            "quantize/search/trellis",
            "quantize/rounding",
            "quantize/rounding/kernels",
        )
        for f in (package / folder).glob("*.py")
    )
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


def share_between_processes(cache: Any) -> Any:
    """Let several processes write to `cache`, one of numba or numba-cuda, at a time. Return it.

    numba numbers the files of one function's code and lists them in an index. Two processes that
    compile it for different types at once both take the next number; from then on one of them, and
    every later process, finds the other's code under its own types.
    """
    files = cache._cache_file
    files.__class__ = _shared(type(files))
    return cache


@functools.cache
def _shared(base: Any) -> type:
    class SharedFiles(base):
        """The files of one function's code, named after the types that they are compiled for."""

        def save(self, key: Any, data: Any) -> None:
            digest = hashlib.sha256(self._dump(key)).hexdigest()[:16]
            name = f"{self._index_name.removesuffix('.nbi')}.{digest}.nbc"
            with locked(Path(self._cache_path) / "iqforge.lock"):
                self._save_data(name, data)  # before the index says that it is there
                self._save_index(self._load_index() | {key: name})

    return SharedFiles


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let only one process at a time hold the lock `path`, which is created. The lock ends with the
    process, however that ends. OSError: it cannot be created.

    Some network file systems have no locks (Lustre without `-o flock`). There, nobody waits: code
    may be compiled by several processes, and as files are replaced whole, all of it is right.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("%s cannot be locked: %s", path, error.strerror)
        yield


_fallback_lock = threading.Lock()  # numba's setting is one for the process


def cached(compile_: Callable[[Callable], Any], function: Callable) -> Any:
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

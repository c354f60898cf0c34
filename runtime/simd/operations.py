"""Operations: compiled functions that several threads call with the same arguments, each doing its
part.

An operation has the signature (arguments, thread, threads): the address of int64 arguments that it
defines itself, and which of how many threads this call is. It is written as a plain function, maybe
with free names that `operation` binds, and called by the address of its code: from `programs`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import types as python_types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ...formats import kernel
from .compiling import in_processes, is_on_disk

log = logging.getLogger(__name__)

SIGNATURE = types.void(types.int64, types.int64, types.int64)


@functools.cache
def _sources_digest() -> str:
    """Digest of the sources that operations come from, see `formats.kernel.sources_digest`."""
    here = sorted(Path(__file__).resolve().parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in here)).hexdigest()[:12]


@functools.cache
def _announce() -> None:
    """Say once that something is compiled."""
    log.info("compiling what runs on this processor, once: this takes a few seconds")


class _Wanted(NamedTuple):
    """An operation by its template, its name, and the free names of the template."""

    template: Callable
    name: str
    names: dict[str, Any]

    @property
    def key(self) -> tuple[Callable, str]:
        return self.template, self.name

    @property
    def function(self) -> Callable:
        """The function to compile. Its `__qualname__` keys its code on disk."""
        name = self.name
        code = self.template.__code__.replace(
            co_name=name, co_qualname=f"{name}-{_sources_digest()}"
        )
        function = python_types.FunctionType(code, self.template.__globals__ | self.names, name)
        function.__module__, function.__qualname__ = self.template.__module__, code.co_qualname
        return function


class _Rehearsal(threading.local):
    """What is asked for in this thread while nothing is to be compiled."""

    wanted: dict[tuple[Callable, str], _Wanted] | None = None


_compiled: dict[tuple[Callable, str], Any] = {}
_rehearsal = _Rehearsal()


def operation(template: Callable, name: str = "", **names: Any) -> int:
    """Return the address of the code of `template`, in which the free `names` have these values.
    `name` tells it from others of the same template. In a rehearsal the address is 0.
    """
    wanted = _Wanted(template, name or template.__name__, names)
    if _rehearsal.wanted is not None:
        _rehearsal.wanted.setdefault(wanted.key, wanted)
        return 0
    return _loaded(wanted).address


def _loaded(wanted: _Wanted) -> Any:
    """Compile an operation, or load its code from the disk."""
    if wanted.key not in _compiled:
        _compiled[wanted.key] = kernel.compiled_callback(wanted.function, SIGNATURE, _announce)
    return _compiled[wanted.key]


@contextmanager
def rehearsed() -> Iterator[dict[tuple[Callable, str], _Wanted]]:
    """Compile nothing while the context is open, in this thread: gather what `operation` is asked
    for, for `compile_together`.
    """
    before, _rehearsal.wanted = _rehearsal.wanted, {}
    try:
        yield _rehearsal.wanted
    finally:
        _rehearsal.wanted = before


def not_compiled(wanted: dict[tuple[Callable, str], _Wanted]) -> list[_Wanted]:
    """Return the operations that are not on disk yet."""
    return [
        operation
        for key, operation in wanted.items()
        if key not in _compiled and not is_on_disk(operation.function, SIGNATURE)
    ]


def compile_together(
    wanted: dict[tuple[Callable, str], _Wanted], others: Sequence[Callable[[], object]] = ()
) -> None:
    """Compile operations that are not on disk yet, and what others compile, on several
    processors.
    """
    if missing := not_compiled(wanted):
        _announce()
        missing.sort(key=lambda operation: -len(operation.template.__code__.co_code))
        in_processes([*(functools.partial(_loaded, operation) for operation in missing), *others])


def packed(*values: int | float) -> np.ndarray:
    """Return arguments of an operation, int64[n]. Floats are stored as float32 in the lower half of
    their place, where `float_at` finds them on little-endian processors.
    """
    found = np.zeros(len(values), dtype=np.int64)
    for i, value in enumerate(values):
        if isinstance(value, float):
            found.view(np.float32)[2 * i] = value
        else:
            found[i] = value
    return found

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
import types as python_types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from ...formats import kernel

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
    log.info(
        "compiling what runs on this processor (once; about a second for each type of weights, and"
        " three for the rest)"
    )


@functools.cache
def _compiled(template: Callable, name: str, names: tuple[tuple[str, Any], ...]) -> Any:
    code = template.__code__.replace(co_name=name, co_qualname=f"{name}-{_sources_digest()}")
    function = python_types.FunctionType(code, template.__globals__ | dict(names), name)
    function.__module__, function.__qualname__ = template.__module__, code.co_qualname
    return kernel.compiled_callback(function, SIGNATURE, _announce)


def operation(template: Callable, name: str = "", **names: Any) -> int:
    """Return the address of the code of `template`, in which the free `names` have these values.
    `name` tells it from others of the same template.
    """
    return _compiled(template, name or template.__name__, tuple(names.items())).address


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

"""The searches of all types: a family file of `search/` registers them by type name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType

import numpy as np

from ..formats.options import checks_keywords
from ..formats.types import TYPES
from . import search


@functools.cache
def searches() -> dict[str, dict[str, Callable]]:
    """Return searches by kind and type name: of a "block", of a "single" group, of a "row" that has
    a header, and in "steps" of blocks or rows; and for some types the encoder that the format
    defines, which is used without importances ("plain", "plain row").
    """
    tables = {
        "block": "BLOCK_SEARCHES",
        "single": "SINGLE_SEARCHES",
        "row": "ROW_SEARCHES",
        "steps": "STEPPED_SEARCHES",
        "plain": "PLAIN_ENCODERS",
        "plain row": "PLAIN_ROW_ENCODERS",
    }
    return {kind: _union(table) for kind, table in tables.items()}


@functools.cache
def _families() -> list[ModuleType]:
    """Import the modules of `search/`. A new file there adds a type."""
    return [
        importlib.import_module(f".search.{module.name}", __package__)
        for module in pkgutil.iter_modules(search.__path__)
    ]


def _union(table: str) -> dict[str, Callable]:
    merged: dict[str, Callable] = {}
    for family in _families():
        for name, function in getattr(family, table, {}).items():
            if merged.setdefault(name, function) is not function:
                raise RuntimeError(f"two entries for {name} in {table}")
    return merged


@functools.cache
def search_tables(name: str) -> tuple[np.ndarray, ...]:
    """Return the read-only arrays that the search for the type takes after its scratch.
    SEARCH_TABLES of its family makes them.
    """
    make = _union("SEARCH_TABLES").get(name)
    return tuple(make()) if make else ()


@checks_keywords
def encodable_types() -> list[str]:
    """Return the names of the types that `encode` supports."""
    known = {"F32", "F16", "BF16"} | {name for table in searches().values() for name in table}
    return [
        t.name
        for t in TYPES.values()
        if t.name in known or (t.base in known and t.name in _interleavable())
    ]


def _interleavable() -> set[str]:
    from ..formats.codecs.interleaved import INTERLEAVERS

    return set(INTERLEAVERS)

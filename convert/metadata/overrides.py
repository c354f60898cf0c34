"""`--metadata FILE`: `general.*` keys that a user sets, which override the model card's and the
folder's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigError, printable
from ...formats.values import Value, ValueType, array, boolean, f32, string, u32
from ..checkpoint.config import read_json

_PREFIX = "general."
# What the rest of the file depends on.
_FIXED = (
    "general.architecture",
    "general.type",
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
)
# Lists of objects, and the prefixes of their keys: base_models [{"name": ...}] ->
# general.base_model.count, general.base_model.0.name
_LISTS = {"general.base_models": "general.base_model", "general.datasets": "general.dataset"}
_MAX_BYTES = 16 << 20


def read_overrides(path: str | os.PathLike) -> dict[str, Value | None]:
    """Return `general.*` key -> value, or None for a key to leave out. Values are strings,
    booleans, numbers and lists of strings; `general.base_models` and `general.datasets` are lists
    of objects with strings.

    Raise NotFoundError, or ConfigError with the key that cannot be set.
    """
    path = Path(path)
    keys: dict[str, Value | None] = {}
    for key, entry in read_json(path, limit=_MAX_BYTES, unique_keys=True).items():
        if not key.startswith(_PREFIX) or key == _PREFIX or not key.isprintable():
            raise ConfigError(
                f"key '{printable(key)}' does not start with '{_PREFIX}'; other keys follow from"
                " the checkpoint",
                file=path,
            )
        if key in _FIXED:
            raise ConfigError(
                f"key '{key}' cannot be set: it describes how the file is written", file=path
            )
        if key in _LISTS:
            keys |= _listed(path, key, entry)
        else:
            keys[key] = None if entry is None else _value(path, key, entry)
    return keys


def _value(path: Path, key: str, entry: Any) -> Value:
    kinds: dict[type, Callable[[Any], Value]] = {str: string, bool: boolean, int: u32, float: f32}
    if isinstance(entry, list) and all(isinstance(item, str) for item in entry):
        return array(ValueType.STRING, entry)
    if type(entry) not in kinds or (type(entry) is int and not 0 <= entry < 2**32):
        raise ConfigError(
            f"key '{printable(key)}' is {printable(entry, 60)}, expected a string, a boolean, a"
            " number from 0 to 2^32 - 1 or a list of strings",
            file=path,
        )
    return kinds[type(entry)](entry)


def _listed(path: Path, key: str, entry: Any) -> dict[str, Value | None]:
    items = entry if isinstance(entry, list) else [None]
    if not all(
        isinstance(item, dict) and all(isinstance(text, str) for text in item.values())
        for item in items
    ):
        raise ConfigError(f"key '{key}' must be a list of objects with strings", file=path)
    prefix = _LISTS[key]
    keys: dict[str, Value | None] = {f"{prefix}.count": u32(len(entry))}
    for number, item in enumerate(entry):
        keys |= {f"{prefix}.{number}.{name}": string(text) for name, text in item.items()}
    return keys


def with_overrides(
    metadata: dict[str, Value], overrides: dict[str, Value | None]
) -> dict[str, Value]:
    """Return `metadata` with the keys set or left out. Existing keys keep their place; new ones
    follow the first block of `general.*` keys.

    A list that is set replaces the existing list as a whole.
    """
    replaced = tuple(f"{prefix}." for prefix in _LISTS.values() if f"{prefix}.count" in overrides)
    dropped = {
        key
        for key in metadata
        if (key in overrides and overrides[key] is None)
        or (key.startswith(replaced) and key not in overrides)
    }
    new = {
        key: value for key, value in overrides.items() if value is not None and key not in metadata
    }
    result: dict[str, Value] = {}
    for key, value in metadata.items():
        if new and not key.startswith(_PREFIX):
            result |= new
            new = {}
        if key not in dropped:
            result[key] = overrides.get(key) or value
    return result | new

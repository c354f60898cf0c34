"""Typed access to `config.json` and similar files. The error for a missing or impossible key names
file and key.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ...errors import ConfigError, NotFoundError, printable
from ...formats.git_lfs import lfs_hint

MAX_JSON_BYTES = 1 << 30
_MISSING = object()


def read_json(
    path: Path, *, limit: int = MAX_JSON_BYTES, unique_keys: bool = False
) -> dict[str, Any]:
    """Read the JSON object in `path`.

    Raise NotFoundError if it cannot be read, ConfigError if it is not a JSON object or, with
    `unique_keys`, has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ConfigError(f"key '{printable(twice)}' occurs twice", file=path)
        return found

    try:
        if path.stat().st_size > limit:
            raise ConfigError(
                f"is {path.stat().st_size} bytes long; more than {limit} are not read", file=path
            )
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror or error}", file=path) from None
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=unique if unique_keys else None)
    except RecursionError:
        raise ConfigError("is nested too deeply", file=path) from None
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise ConfigError(f"is not JSON: {printable(error)}{lfs_hint(data)}", file=path) from None
    if not isinstance(found, dict):
        raise ConfigError(f"holds a JSON {type(found).__name__}, not an object", file=path)
    return found


class Config:
    """Typed access to a JSON object. Getters take several spellings of a key; null counts as
    absent.

    Without `default` an absent key raises ConfigError. Defaults are given only where the model
    class itself has one.
    """

    def __init__(self, values: dict[str, Any], file: Path, path: str = ""):
        self.values, self.file, self._path = values, file, path

    @classmethod
    def read(cls, file: Path) -> Config:
        """Read a JSON file. Raise NotFoundError if it cannot be read, ConfigError if it is not a
        JSON object.
        """
        return cls(read_json(file), file)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self.values.get(key) is not None:
                return self._path + key, self.values[key]
        if default is _MISSING:
            raise ConfigError(f"key '{self._path + keys[0]}' is missing", file=self.file)
        return self._path + keys[0], default

    def _wrong(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(
            f"key '{key}' is {printable(json.dumps(value, default=str))}, expected {wanted}",
            file=self.file,
        )

    def integer(
        self, *keys: str, default: Any = _MISSING, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """Return an integer from `minimum` to `maximum`. Floats with an integral value pass, as
        some configs have them. Raise ConfigError for another value.
        """
        key, value = self._get(keys, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, *keys: str, default: Any = _MISSING, positive: bool = True) -> float:
        """Return a finite number, above zero unless `positive` is false. Raise ConfigError for
        another value.
        """
        key, value = self._get(keys, default)
        if value is default:
            return value
        # False for NaN, infinity and integers beyond any float.
        finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not finite or (positive and value <= 0):
            raise self._wrong(key, value, "a positive number" if positive else "a finite number")
        return float(value)

    def boolean(self, *keys: str, default: Any = _MISSING) -> bool:
        """Return the first of `keys` that is present: true or false. Raise ConfigError for another
        value.
        """
        key, value = self._get(keys, default)
        if value is not default and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def string(self, *keys: str, default: Any = _MISSING) -> str:
        """Return the first of `keys` that is present: a string. Raise ConfigError for another
        value.
        """
        key, value = self._get(keys, default)
        if value is not default and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def strings(self, *keys: str, default: Any = _MISSING) -> list[str]:
        """Return the first of `keys` that is present: a list of strings. Raise ConfigError for
        another value.
        """
        key, value = self._get(keys, default)
        if value is not default and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise self._wrong(key, value, "a list of strings")
        return value

    def integers(self, *keys: str, default: Any = _MISSING) -> list[int]:
        """Return the first of `keys` that is present: a list of integers. Raise ConfigError for
        another value.
        """
        key, value = self._get(keys, default)
        if value is not default and not (
            isinstance(value, list) and all(type(item) is int for item in value)
        ):
            raise self._wrong(key, value, "a list of integers")
        return value

    def numbers(self, *keys: str, length: int) -> list[float]:
        """Return a list of `length` positive numbers. Raise ConfigError for another value."""
        key, value = self._get(keys, _MISSING)
        fits = isinstance(value, list) and len(value) == length
        if not fits or not all(
            type(item) in (int, float) and 0 < item <= sys.float_info.max for item in value
        ):
            raise self._wrong(key, value, f"a list of {length} positive numbers")
        return [float(item) for item in value]

    def section(self, *keys: str) -> Config | None:
        """Return a nested object; None if it is absent. Raise ConfigError for another value."""
        key, value = self._get(keys, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Config(value, self.file, f"{key}.")

    def of_text(self) -> Config:
        """Return the settings of the text model. In a multimodal one, entries of `text_config`
        override the outer ones.
        """
        inner = self.section("text_config")
        return self if inner is None else Config({**self.values, **inner.values}, self.file)

    def with_defaults(self, defaults: dict[str, Any]) -> Config:
        """Return the same settings with `defaults` for absent keys."""
        present = {key: value for key, value in self.values.items() if value is not None}
        return Config({**defaults, **present}, self.file, self._path)

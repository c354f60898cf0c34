"""Typed reading of the `<arch>.*` metadata of a model file: no silent defaults, every refusal names
file and key.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, printable
from ...formats.values import Value, get

_REQUIRED: Any = object()
_MOST = 2**31 - 1


class Hyperparameters:
    """The hyperparameters of one model. Keys are given without the `<arch>.` prefix."""

    def __init__(self, metadata: dict[str, Value], file: str):
        self.metadata, self.file = metadata, file
        self.architecture: str = get(metadata, "general.architecture", str, file=file)

    def integer(
        self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = _MOST
    ) -> int:
        """An integer between `least` and `most`; ConfigError for anything else, or for a missing
        key without default.
        """
        if default is not _REQUIRED and not self.has(key):
            return default
        return self._bounded(
            key, get(self.metadata, self._full(key), int, file=self.file), least, most
        )

    def number(
        self,
        key: str,
        default: Any = _REQUIRED,
        *,
        above: float | None = None,
        least: float | None = None,
    ) -> float:
        """A float, greater than `above` and at least `least` where these are given. Raise
        ConfigError, with file and key, for other values.
        """
        if default is not _REQUIRED and not self.has(key):
            return default
        value = get(self.metadata, self._full(key), float, file=self.file)
        expected = "a finite number"
        wrong = value != value or abs(value) == float("inf")
        if above is not None:
            wrong, expected = wrong or value <= above, f"more than {above}"
        if least is not None:
            wrong, expected = wrong or value < least, f"at least {least}"
        if wrong:
            raise ConfigError(
                f"metadata key '{self._full(key)}' is {value}, expected {expected}", file=self.file
            )
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return the string of a key, or `default` if it is absent. Raise an error that names file
        and key if it is missing or of another type.
        """
        if default is not _REQUIRED and not self.has(key):
            return default
        return get(self.metadata, self._full(key), str, file=self.file)

    def per_layer(
        self,
        key: str,
        n_layers: int,
        default: Any = _REQUIRED,
        *,
        least: int = 1,
        n_blocks: int = 0,
    ) -> tuple[int, ...]:
        """Return one integer of at least `least` per layer, from a key that holds one or an array
        of them. The array may also be for `n_blocks`, of which the layers are the first. Raise
        ConfigError, with file and key, for other values.
        """
        if default is not _REQUIRED and not self.has(key):
            return default
        data = get(self.metadata, self._full(key), (int, list), file=self.file)
        if isinstance(data, int):
            return (self._bounded(key, data, least, _MOST),) * n_layers
        if len(data) not in (n_layers, n_blocks or n_layers) or not all(
            isinstance(x, int) for x in data
        ):
            raise ConfigError(
                f"metadata key '{self._full(key)}' has {len(data)} items, expected {n_layers}"
                " integers",
                file=self.file,
            )
        return tuple(self._bounded(key, x, least, _MOST) for x in data[:n_layers])

    def at_least_per_layer(self, key: str, n_layers: int) -> tuple[int, ...]:
        """Return one integer of 0 or more per layer, from an array that may go on for blocks that
        the file lacks. Raise ConfigError, with file and key, for other values.
        """
        data = get(self.metadata, self._full(key), list, file=self.file)
        if len(data) < n_layers or not all(isinstance(x, int) for x in data):
            raise ConfigError(
                f"metadata key '{self._full(key)}' has {len(data)} items, expected {n_layers}"
                " integers or more",
                file=self.file,
            )
        return tuple(self._bounded(key, x, 0, _MOST) for x in data[:n_layers])

    def integers(self, key: str, n: int, *, least: int = 0, most: int = _MOST) -> tuple[int, ...]:
        """Return n integers between `least` and `most`. Raise ConfigError, with file and key, for
        other values.
        """
        data = get(self.metadata, self._full(key), list, file=self.file)
        if len(data) != n or not all(isinstance(x, int) for x in data):
            raise ConfigError(
                f"metadata key '{self._full(key)}' has {len(data)} items, expected {n} integers",
                file=self.file,
            )
        return tuple(self._bounded(key, x, least, most) for x in data)

    def numbers(
        self,
        key: str,
        n_layers: int,
        default: Any = _REQUIRED,
        *,
        n_blocks: int = 0,
        least: float | None = 0.0,
        prefixed: bool = True,
        may_be_all: bool = False,
    ) -> tuple[float, ...]:
        """Return one number per layer, from a key that holds one or an array of them, or `default`
        for all. The array may also be for `n_blocks`, of which the layers are the first. prefixed:
        the key follows the architecture's name. may_be_all: minus infinity is a number, too. Raise
        ConfigError, with file and key, for other values.
        """
        name = self._full(key) if prefixed else key
        if default is not _REQUIRED and name not in self.metadata:
            return (default,) * n_layers
        data = get(self.metadata, name, (float, list), file=self.file)
        items = [data] * n_layers if isinstance(data, float) else data
        lowest, highest = -float("inf") if least is None else least, float("inf")
        if len(items) not in (n_layers, n_blocks or n_layers) or not all(
            isinstance(x, float) and lowest <= x < highest and (may_be_all or x != -highest)
            for x in items
        ):
            raise ConfigError(
                f"metadata key '{name}' has {len(items)} items, expected {n_layers} finite numbers"
                + ("" if least is None else f" of at least {least:g}"),
                file=self.file,
            )
        return tuple(items[:n_layers])

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or False."""
        if default is not _REQUIRED and not self.has(key):
            return default
        return get(self.metadata, self._full(key), bool, file=self.file)

    def flags(
        self, key: str, n_layers: int, default: Any = _REQUIRED, *, n_blocks: int = 0
    ) -> tuple[bool, ...]:
        """Return True or False for each layer, from an array of them. The array may also be for
        `n_blocks`, of which the layers are the first. Raise ConfigError, with file and key, for
        other values.
        """
        if default is not _REQUIRED and not self.has(key):
            return default
        data = get(self.metadata, self._full(key), list, file=self.file)
        if len(data) not in (n_layers, n_blocks or n_layers) or not all(
            isinstance(x, (bool, int)) for x in data
        ):
            raise ConfigError(
                f"metadata key '{self._full(key)}' has {len(data)} items, expected {n_layers} times"
                " true or false",
                file=self.file,
            )
        return tuple(bool(x) for x in data[:n_layers])

    def has(self, key: str) -> bool:
        """Return whether the file has the key."""
        return self._full(key) in self.metadata

    def refuse(self, key: str, harmless: tuple = ()) -> None:
        """ConfigError if `key` is present with a value that would change the result and is not
        evaluated.
        """
        value = self.metadata.get(self._full(key))
        if value is not None and value.data not in harmless:
            raise ConfigError(
                f"metadata key '{self._full(key)}' is {printable(value.data)}, which this version"
                " does not evaluate",
                file=self.file,
            )

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _bounded(self, key: str, value: int, least: int, most: int) -> int:
        if not least <= value <= most:
            raise ConfigError(
                f"metadata key '{self._full(key)}' is {value}, expected {least} to {most}",
                file=self.file,
            )
        return value

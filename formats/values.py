"""GGUF metadata values. Values have their stored type, so copied keys stay exactly the same."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError


class ValueType(enum.IntEnum):
    """Type ids of metadata values (GGUF specification, version 3)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


STRUCT_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class Value:
    """One metadata value. `data`: int, float, bool, str, or a list of these with `element` as their
    type.

    Strings of the file that are not UTF-8 keep their bytes as surrogate escapes, so that they are
    written back unchanged.
    """

    type: ValueType
    data: Any
    element: ValueType | None = None

    @property
    def item_type(self) -> ValueType:
        """The type of an array's items. Raise TypeError for a value without items."""
        if self.element is None:
            raise TypeError(f"a value of type {self.type.name} has no items")
        return self.element


def u16(x: int) -> Value:
    """Return x as a metadata value of type UINT16."""
    return Value(ValueType.UINT16, int(x))


def u32(x: int) -> Value:
    """Return x as a metadata value of type UINT32."""
    return Value(ValueType.UINT32, int(x))


def i32(x: int) -> Value:
    """Return x as a metadata value of type INT32."""
    return Value(ValueType.INT32, int(x))


def f32(x: float) -> Value:
    """Return x as a metadata value of type FLOAT32."""
    return Value(ValueType.FLOAT32, float(x))


def boolean(x: bool) -> Value:
    """Return x as a metadata value of type BOOL."""
    return Value(ValueType.BOOL, bool(x))


def string(x: str) -> Value:
    """Return x as a metadata value of type STRING."""
    return Value(ValueType.STRING, str(x))


def array(element: ValueType, items: list) -> Value:
    """Return a list as a metadata value of type ARRAY with items of type `element`; the items are
    not checked.
    """
    return Value(ValueType.ARRAY, list(items), element)


_MISSING = object()


def get(
    metadata: dict[str, Value],
    key: str,
    kind: type | tuple[type, ...],
    default: Any = _MISSING,
    *,
    file: str | None = None,
) -> Any:
    """Return the data of `key`, checked to be an instance of `kind` (int, float, bool, str or
    list).

    Raise ConfigError naming file and key when the key is missing (and no default was given) or
    holds something else.
    """
    if key not in metadata:
        if default is _MISSING:
            raise ConfigError(f"metadata key '{key}' is missing", file=file)
        return default
    data = metadata[key].data
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if float in kinds and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise ConfigError(
            f"metadata key '{key}' holds {metadata[key].type.name}, expected {wanted}", file=file
        )
    return data

"""Convert metadata of a GGUF file to and from bytes.

A pair is: key (u64 length, bytes), u32 value type, value. Strings are a u64 length and bytes;
arrays are a u32 element type, a u64 count and the elements; everything else has its C layout,
little-endian. Source: GGUF specification, v3.
"""

from __future__ import annotations

import struct

import numpy as np

from ...errors import IqforgeError, MalformedFileError, TruncatedFileError, printable
from ..values import STRUCT_CODES, Value, ValueType
from .cursor import Cursor

MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # a one-letter key with a one-byte value
MAX_KEY_BYTES = 65_535
# Far above any real file (the largest vocabularies have some 300,000 tokens and 500,000 merges),
# and low enough that a sparse file of terabytes cannot make the reader allocate for the zeros it
# promises.
MAX_STRING_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 23
MAX_ARRAY_DEPTH = 4

_SIZES = {kind: struct.calcsize("<" + code) for kind, code in STRUCT_CODES.items()}
_MIN_ELEMENT_BYTES = {**_SIZES, ValueType.STRING: 8, ValueType.ARRAY: 4 + 8}
_LENGTH = struct.Struct("<Q")


class MetadataParser:
    """Read key-value pairs from a cursor, with one budget of array elements for all of them."""

    def __init__(self, cursor: Cursor):
        self.cursor, self.elements_left = cursor, MAX_ELEMENTS

    def pairs(self, count: int) -> dict[str, Value]:
        """Read the next `count` pairs. Raise MalformedFileError for duplicate or unprintable keys
        and impossible values.
        """
        metadata: dict[str, Value] = {}
        for index in range(count):
            start = self.cursor.position
            key = self._key(index, count)
            if key in metadata:
                raise MalformedFileError(
                    f"metadata key '{printable(key)}' appears twice",
                    file=self.cursor.file,
                    offset=start,
                )
            metadata[key] = self._value(f"metadata key '{printable(key)}'")
        return metadata

    def _key(self, index: int, count: int) -> str:
        cursor, start = self.cursor, self.cursor.position
        what = f"key {index + 1} of {count}"
        n_bytes = cursor.u64(f"the length of {what}")
        if not 0 < n_bytes <= MAX_KEY_BYTES:
            raise self._malformed(
                f"{what} has {n_bytes} bytes; a key has 1 to {MAX_KEY_BYTES}", start
            )
        raw = cursor.bytes(n_bytes, what)
        key = raw.decode("utf-8", "backslashreplace")
        if not key.isprintable() or key.encode() != raw:
            raise self._malformed(f"{what} is not printable UTF-8 text: '{printable(key)}'", start)
        return key

    def _value(self, what: str) -> Value:
        kind = self._kind(what)
        if kind is ValueType.ARRAY:
            return self._array(what, 1)
        if kind is ValueType.STRING:
            return Value(kind, self._strings(1, what)[0])
        return Value(kind, self._numbers(kind, 1, what)[0])

    def _kind(self, what: str) -> ValueType:
        start = self.cursor.position
        number = self.cursor.u32(f"the value type of {what}")
        if number > max(ValueType):
            raise self._malformed(
                f"{what} has value type {number}; the highest one is {int(max(ValueType))}", start
            )
        return ValueType(number)

    def _array(self, what: str, depth: int) -> Value:
        start = self.cursor.position
        element = self._kind(what)
        count = self.cursor.u64(f"the array length of {what}")
        if element is ValueType.ARRAY and depth == MAX_ARRAY_DEPTH:
            raise self._malformed(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep", start)
        if count * _MIN_ELEMENT_BYTES[element] > self.cursor.left:
            raise TruncatedFileError(
                f"{what} claims {count} elements of type {element.name}, at least"
                f" {count * _MIN_ELEMENT_BYTES[element]} bytes; {self.cursor.left} are left in the"
                " file",
                file=self.cursor.file,
                offset=start,
            )
        if count > self.elements_left:
            raise self._malformed(
                f"{what} has {count} elements; all arrays together may have {MAX_ELEMENTS}", start
            )
        self.elements_left -= count
        if element is ValueType.ARRAY:
            return Value(
                ValueType.ARRAY, [self._array(what, depth + 1) for _ in range(count)], element
            )
        items = (
            self._strings(count, what)
            if element is ValueType.STRING
            else self._numbers(element, count, what)
        )
        return Value(ValueType.ARRAY, items, element)

    def _numbers(self, kind: ValueType, count: int, what: str) -> list:
        cursor = self.cursor
        start = cursor.take(count * _SIZES[kind], what)
        if kind is ValueType.BOOL:
            raw = cursor.buffer[start : start + count]
            if raw.strip(b"\0\1"):
                wrong = next(index for index, byte in enumerate(raw) if byte > 1)
                raise self._malformed(
                    f"{what} holds the bool {raw[wrong]}; only 0 and 1 exist", start + wrong
                )
            return [byte == 1 for byte in raw]
        return (
            np.frombuffer(cursor.buffer, "<" + STRUCT_CODES[kind], count, start).tolist()
            if count
            else []
        )

    def _strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has hundreds of thousands of strings, so this loop calls as little as
        # possible.
        cursor = self.cursor
        buffer, size, position = cursor.buffer, cursor.size, cursor.position
        loaded = len(buffer)
        unpack, strings = _LENGTH.unpack_from, []
        for index in range(count):
            start = position + 8
            if start > size:
                raise self._truncated_string(what, index, "its length takes 8 bytes", position)
            if start > loaded:
                loaded = len(buffer := cursor.load(start))
            n_bytes = unpack(buffer, position)[0]
            position = start + n_bytes
            if position > size:
                raise self._truncated_string(what, index, f"it has {n_bytes} bytes", start)
            if n_bytes > MAX_STRING_BYTES:
                raise self._malformed(
                    f"{what}: string {index + 1} has {n_bytes} bytes, more than {MAX_STRING_BYTES}",
                    start - 8,
                )
            if position > loaded:
                loaded = len(buffer := cursor.load(position))
            strings.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        cursor.position = position
        return strings

    def _malformed(self, message: str, offset: int) -> MalformedFileError:
        return MalformedFileError(printable(message, 400), file=self.cursor.file, offset=offset)

    def _truncated_string(
        self, what: str, index: int, claim: str, offset: int
    ) -> TruncatedFileError:
        message = (
            f"{what}: string {index + 1}: {claim}, {self.cursor.size - offset} are left in the file"
        )
        return TruncatedFileError(printable(message, 400), file=self.cursor.file, offset=offset)


def encode_pair(key: str, value: Value) -> bytes:
    """Return the bytes of one pair. Raise IqforgeError naming the key if the value does not fit its
    type.
    """
    try:
        return _encode_string(key) + struct.pack("<I", value.type) + _encode(value)
    except (struct.error, OverflowError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise IqforgeError(
            f"metadata key '{printable(key)}' cannot be written as {_kind_name(value)}: {error}"
        ) from error


def _kind_name(value: Value) -> str:
    return (
        value.type.name if value.element is None else f"{value.type.name} of {value.element.name}"
    )


def _encode(value: Value) -> bytes:
    if value.type is ValueType.STRING:
        return _encode_string(value.data)
    if value.type is not ValueType.ARRAY:
        return struct.pack("<" + STRUCT_CODES[value.type], value.data)
    head = struct.pack("<IQ", value.item_type, len(value.data))
    if value.item_type is ValueType.ARRAY:
        return head + b"".join(map(_encode, value.data))
    if value.item_type is ValueType.STRING:
        return head + b"".join(map(_encode_string, value.data))
    return head + struct.pack(f"<{len(value.data)}{STRUCT_CODES[value.item_type]}", *value.data)


def _encode_string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return _LENGTH.pack(len(raw)) + raw

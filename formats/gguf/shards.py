"""Split models: the names of shards, their keys, and the checks that a set of them belongs
together.

`split.no` (u16, from 0), `split.count` (u16) and `split.tensors.count` (i32, over all shards) are
in every shard; all other metadata is in the first one. A file with `split.count` 0 or 1 is whole: 0
is what merging produces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import SplitError, printable
from ..values import Value, ValueType, u16

MAX_SHARDS = 65_535
KEY_NO, KEY_COUNT, KEY_TENSORS = "split.no", "split.count", "split.tensors.count"
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_path(prefix: str | os.PathLike, index: int, count: int) -> Path:
    """Return `<prefix>-00001-of-00003.gguf` for index 0 of 3."""
    return Path(f"{os.fspath(prefix)}-{index + 1:05d}-of-{count:05d}.gguf")


def split_keys(index: int, count: int, n_tensors: int) -> dict[str, Value]:
    """Return the three keys of shard `index`, with their types, in the order of the file."""
    return {
        KEY_NO: u16(index),
        KEY_COUNT: u16(count),
        KEY_TENSORS: Value(ValueType.INT32, n_tensors),
    }


def split_number(
    metadata: Mapping[str, Value], key: str, file: str, default: int | None = None
) -> int:
    """Return the integer at one of the split keys. Raise SplitError if it is missing (without
    `default`), not an integer, or out of range.
    """
    if (value := metadata.get(key)) is None:
        if default is None:
            raise SplitError(f"metadata key '{key}' is missing", file=file)
        return default
    if not isinstance(value.data, int) or isinstance(value.data, bool):
        raise SplitError(
            f"metadata key '{key}' holds {value.type.name}, expected an integer", file=file
        )
    limit = MAX_SHARDS if key != KEY_TENSORS else 2**31 - 1
    if not 0 <= value.data <= limit:
        raise SplitError(f"metadata key '{key}' is {value.data}, expected 0 to {limit}", file=file)
    return value.data


def is_split(metadata: Mapping[str, Value], file: str) -> bool:
    """Return whether the file is one of several shards."""
    return split_number(metadata, KEY_COUNT, file, default=1) > 1


def sibling_paths(path: str, metadata: Mapping[str, Value]) -> list[Path]:
    """Return all shard paths of the model whose first shard is `path`, checked to exist.

    Raise SplitError if `path` is another shard (it says which one to open), has no shard name, or
    if a file is missing. Names come from the path alone, never from the file's content.
    """
    no, count = split_number(metadata, KEY_NO, path), split_number(metadata, KEY_COUNT, path)
    name = _SHARD_NAME.fullmatch(path)
    if no != 0:
        first = (
            shard_path(name["prefix"], 0, count)
            if name
            else f"the one whose name ends in -00001-of-{count:05d}.gguf"
        )
        raise SplitError(
            f"this is shard {no + 1} of {count}; open {printable(first, 400)}", file=path
        )
    if not name or int(name["no"]) != 1 or int(name["count"]) != count:
        raise SplitError(
            f"the first of {count} shards must be called <prefix>-00001-of-{count:05d}.gguf",
            file=path,
        )
    paths = []
    for index in range(count):
        paths.append(shard_path(name["prefix"], index, count))
        if not paths[-1].is_file():
            raise SplitError(
                f"shard {index + 1} of {count} is missing: {printable(paths[-1], 400)}", file=path
            )
    return paths


def check_shard(
    first: Mapping[str, Value], metadata: Mapping[str, Value], index: int, file: str
) -> None:
    """Raise SplitError unless the file with `metadata` is shard `index` of the model whose first
    shard has the metadata `first`.
    """
    for key, expected in (
        (KEY_NO, index),
        (KEY_COUNT, first[KEY_COUNT].data),
        (KEY_TENSORS, split_number(first, KEY_TENSORS, file)),
    ):
        if (found := split_number(metadata, key, file)) != expected:
            raise SplitError(f"metadata key '{key}' is {found}, expected {expected}", file=file)
    stated, wanted = metadata.get("general.architecture"), first.get("general.architecture")
    if stated is not None and stated != wanted:
        raise SplitError(
            f"general.architecture is '{printable(stated.data)}', the first shard has "
            f"'{printable(wanted.data if wanted else None)}'",
            file=file,
        )

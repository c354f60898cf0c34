"""Plan the files of an output: one file or shards, and whether they fit on the disk."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import UsageError
from ..disk import check_space
from ..gguf.layout import FileLayout
from ..gguf.sharded_writer import ShardedWriter
from ..gguf.shards import shard_path, split_keys
from ..gguf.writer import GGUFWriter
from ..output import refuse_same_file
from ..source import TensorInfo
from ..values import Value

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class ShardLimits:
    """Limits for shards of a converted model; by default there are none. At most one of the first
    two may be given.

    max_size: bytes, or `300M`, `2G`, `500K`. metadata_first: the first shard has no tensors.
    """

    max_tensors: int | None = None
    max_size: str | int | None = None
    metadata_first: bool = False

    def __post_init__(self):
        if self.max_tensors is not None and self.max_size is not None:
            raise UsageError("give either a number of tensors or a size per shard, not both")
        if self.max_tensors is not None and self.max_tensors < 1:
            raise UsageError(f"{self.max_tensors} tensors per shard; at least 1 is needed")
        if self.metadata_first and self.max_tensors is None and self.max_size is None:
            raise UsageError(
                "a first shard without tensors needs a limit for the others: a number of tensors or"
                " a size"
            )
        self.bytes  # noqa: B018  raises for a size that is none

    @property
    def bytes(self) -> int | None:
        """The largest size of a shard in bytes, or None. Raise UsageError for text such as `3X` or
        0; K, M and G are 10^3, 10^6 and 10^9.
        """
        if self.max_size is None:
            return None
        match = re.fullmatch(r"(\d{1,18})([KMG]?)", str(self.max_size))
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"shard size '{self.max_size}': expected a whole number above 0; K, M and G are"
                " 10^3, 10^6 and 10^9 bytes"
            )
        return int(match[1]) * _UNITS[match[2]]

    def groups(self, tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
        """Return the tensors of each shard, cut where llama.cpp's converter cuts: by bytes without
        padding, a larger tensor gets its own.
        """
        groups: list[list[TensorInfo]] = [[], []] if self.metadata_first and tensors else [[]]
        filled, limit = 0, self.bytes
        for tensor in tensors:
            current = groups[-1]
            full = len(current) == self.max_tensors or (
                limit is not None and filled + tensor.n_bytes > limit
            )
            if current and full:
                groups.append([])
                filled = 0
            groups[-1].append(tensor)
            filled += tensor.n_bytes
        return groups


@dataclass(frozen=True)
class OutputPlan:
    """`paths` of the files to come, the tensors and the layout of each. skip: numbers of shards
    that already exist and are kept.
    """

    metadata: dict[str, Value]
    paths: tuple[Path, ...]
    groups: tuple[tuple[TensorInfo, ...], ...]
    layouts: tuple[FileLayout, ...]
    skip: frozenset[int] = frozenset()

    @property
    def written(self) -> list[FileLayout]:
        """The layouts of the files that are written."""
        return [layout for index, layout in enumerate(self.layouts) if index not in self.skip]

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all files, headers and padding included."""
        return sum(layout.n_bytes for layout in self.written)

    @property
    def headers(self) -> str:
        """The SHA-256 of all headers, in hexadecimal."""
        return hashlib.sha256(b"".join(layout.header for layout in self.layouts)).hexdigest()

    @property
    def free_bytes(self) -> int:
        """Return the bytes that the disk has left, -1 if it does not say. A file that is replaced
        still counts, as it is deleted when the new one is complete.
        """
        try:
            usage = shutil.disk_usage(self.paths[0].resolve().parent)
        except OSError:  # opening the output says what is wrong with the folder
            return -1
        return usage.free if usage.total else -1

    def __str__(self) -> str:
        n_tensors = sum(map(len, self.groups))
        where = f"{self.paths[0]}" + (
            f" and {len(self.paths) - 1} more shards" if len(self.paths) > 1 else ""
        )
        free = f"; {self.free_bytes / 1e9:.2f} GB are free" if self.free_bytes >= 0 else ""
        return f"{where}: {n_tensors} tensors, {self.n_bytes / 1e6:.2f} MB{free}"

    def check_space(self) -> None:
        """Raise OutputError with both numbers if the disk has less space than the files take."""
        check_space(self.paths[0].resolve().parent, self.n_bytes, self.paths[0])

    def open(self, keep: bool = False) -> GGUFWriter | ShardedWriter:
        """Return the sink. keep: it begins with a call of `resume`. Raise OutputError if the disk
        is too small, before anything is written.
        """
        tensors = [tensor for group in self.groups for tensor in group]
        if len(self.paths) == 1:
            return GGUFWriter(self.paths[0], self.metadata, tensors, keep=keep)
        return ShardedWriter(
            _prefix(self.paths[0], len(self.paths)),
            self.metadata,
            tensors,
            self.groups,
            keep,
            self.skip,
        )


def plan_output(
    path: Path,
    metadata: dict[str, Value],
    tensors: Sequence[TensorInfo],
    limits: ShardLimits = ShardLimits(),
    inputs: Sequence[str | os.PathLike] = (),
    groups: Sequence[Sequence[TensorInfo]] | None = None,
) -> OutputPlan:
    """Plan the files for `tensors`: `path` itself, or `<stem>-0000i-of-0000N.gguf` next to it if
    `limits` ask for more than one.

    groups: the tensors of every file, instead of limits. These files get names of shards, also a
    single one, which has no split keys. Raise OutputError if one of the files is an input or could
    not be valid. Nothing is written.
    """
    named, groups = (
        groups is not None,
        tuple(tuple(group) for group in (limits.groups(tensors) if groups is None else groups)),
    )
    if len(groups) == 1:
        stem = path.with_suffix("") if path.suffix == ".gguf" else path
        paths = (shard_path(stem, 0, 1) if named else path,)
        layouts = [FileLayout(paths[0], metadata, tensors)]
    else:
        prefix, count = path.with_suffix("") if path.suffix == ".gguf" else path, len(groups)
        paths = tuple(shard_path(prefix, index, count) for index in range(count))
        layouts = [
            FileLayout(
                shard,
                (metadata if index == 0 else {}) | split_keys(index, count, len(tensors)),
                group,
            )
            for index, (shard, group) in enumerate(zip(paths, groups))
        ]
    for file in paths:
        refuse_same_file(file, inputs)
    return OutputPlan(metadata, paths, groups, tuple(layouts))


def _prefix(first: Path, count: int) -> str:
    return str(first).removesuffix(f"-{1:05d}-of-{count:05d}.gguf")

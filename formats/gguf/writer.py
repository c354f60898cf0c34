"""Writing GGUF files as Sinks: the layout is known before the first byte, data streams, the file appears only when whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import IqforgeError, OutputError
from ..output import PartFile, check_space
from ..source import TensorInfo
from . import shards as shard_rules
from .header import DEFAULT_ALIGNMENT, Header, encode_header, pad_to, parse_header, stated_alignment
from .reader import MappedFile
from .values import Value, u32

_PIECE = 64 << 20  # bytes handed to one write call, so that Ctrl-C is answered


class _Finishing:
    """As a context manager a Sink finishes at the end and aborts on any exception."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()


class GGUFWriter(_Finishing):
    """A `Sink` for one GGUF file (version 3). Tensors are laid out and must be written in the order of `tensors`.

    `alignment` of tensor data in bytes: by default what `general.alignment` in `metadata` says, else 32; an explicit value
    other than 32 becomes that key. The header is parsed back by our own reader before anything is written and once more from
    the disk before the file gets its name. Missing disk space is an OutputError at once. As a context manager: finishes
    at the end, aborts on any exception.
    """

    def __init__(self, path: str | os.PathLike, metadata: dict[str, Value], tensors: Sequence[TensorInfo], alignment: int | None = None):
        self.path = Path(path)
        self._part: PartFile | None = None
        self._plan = FileLayout(path, metadata, tensors, alignment)
        self._part = self._plan.open()
        self._index, self._written = 0, 0

    @property
    def n_bytes(self) -> int:
        """Size of the finished file."""
        return self._plan.n_bytes

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append the next bytes of `tensor`, as any C-contiguous array. IqforgeError if it is not this tensor's turn or
        if the bytes are more than its type and shape take; OutputError if they cannot be written."""
        if self._part is None:
            raise IqforgeError("the writer was finished or aborted", file=self.path, tensor=tensor.name)
        expected = self._expected(tensor)
        data = np.ascontiguousarray(data)
        if self._written + data.nbytes > expected.n_bytes:
            raise IqforgeError(f"got {self._written + data.nbytes} bytes, shape {list(expected.shape)} in {expected.type} takes "
                               f"{expected.n_bytes}", file=self.path, tensor=tensor.name)
        flat = data.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _PIECE):
            self._part.write(flat[start:start + _PIECE])
        self._written += data.nbytes
        if self._written == expected.n_bytes:
            self._index, self._written = self._index + 1, 0
            self._pad()

    def finish(self) -> None:
        """Sync, check the header on the disk, rename. IqforgeError if a tensor is missing or incomplete."""
        if self._part is None:
            return
        try:
            self.complete()
            self._part.commit()
        finally:
            self.abort()

    def complete(self) -> None:
        """Everything of `finish` but the rename."""
        if self._index < len(self._plan.tensors):
            expected = self._plan.tensors[self._index]
            raise IqforgeError(f"finished with {self._written} of {expected.n_bytes} bytes, tensor {self._index + 1} of "
                               f"{len(self._plan.tensors)}", file=self.path, tensor=expected.name)
        self._part.sync()
        written = MappedFile(self._part.part_path)
        try:
            self._plan.check(written.header)
        finally:
            written.close()

    def park(self) -> None:
        """Give the file handle back after `complete`."""
        self._part.park()

    def remove_older(self) -> None:
        """Delete what has the final name so far."""
        self._part.remove_older()

    def commit(self) -> None:
        """The rename of `finish`, after `complete`."""
        self._part.commit()
        self._part = None

    def abort(self) -> None:
        """Remove the unfinished file; does nothing after `finish`."""
        part, self._part = self._part, None
        if part is not None:
            part.abort()

    def __del__(self) -> None:
        if getattr(self, "_part", None) is not None:
            self.abort()

    def _expected(self, tensor: TensorInfo) -> TensorInfo:
        if self._index == len(self._plan.tensors):
            raise IqforgeError(f"all {len(self._plan.tensors)} tensors are written already", file=self.path, tensor=tensor.name)
        expected = self._plan.tensors[self._index]
        if tensor != expected:
            raise IqforgeError(f"written out of turn as {list(tensor.shape)} in {tensor.type}; next is '{expected.name}', "
                               f"{list(expected.shape)} in {expected.type}", file=self.path, tensor=tensor.name)
        return expected

    def _pad(self) -> None:
        self._part.write(bytes(pad_to(self._part.position, self._plan.alignment) - self._part.position))


class FileLayout:
    """Header bytes, tensor places and final size of a file that is to be written."""

    def __init__(self, path: str | os.PathLike, metadata: dict[str, Value], tensors: Sequence[TensorInfo], alignment: int | None = None):
        self.path, self.tensors = os.fspath(path), tuple(tensors)
        if alignment is not None and alignment != DEFAULT_ALIGNMENT:
            metadata = {**metadata, "general.alignment": u32(alignment)}
        self.metadata = metadata
        try:
            self.alignment = stated_alignment(metadata, self.path)
            self.header, self.offsets = encode_header(metadata, self.tensors, self.alignment)
            self.n_bytes = pad_to(self.offsets[-1] + self.tensors[-1].n_bytes, self.alignment) if self.tensors else len(self.header)
            self.check(parse_header(self.header, self.path, self.n_bytes))
        except OutputError:
            raise
        except IqforgeError as error:
            raise OutputError(f"would not be a valid file: {error}", file=self.path) from error

    def check(self, found: Header) -> None:
        """OutputError if a parsed header is not the one that was to be written."""
        kinds = [{key: (value.type, value.element) for key, value in metadata.items()} for metadata in (found.metadata, self.metadata)]
        same = found.tensors == self.tensors and list(found.offsets) == self.offsets and found.alignment == self.alignment
        if kinds[0] != kinds[1] or not same:
            raise OutputError("the header reads back differently from what was written", file=self.path)

    def open(self) -> PartFile:
        """The `.part` with its header written."""
        part = PartFile(self.path, self.n_bytes)
        try:
            part.write(self.header)
        except BaseException:
            part.abort()
            raise
        return part


class ShardedWriter(_Finishing):
    """A `Sink` for a split model: `<prefix>-00001-of-0000N.gguf` and so on, each shard complete before the next begins.

    `shards` lists the tensors of each shard, together `tensors` in order. The first shard gets `metadata` and the split
    keys (in place where `metadata` has them), the others only the split keys. No shard has its name before `finish`; an abort
    removes all of them.
    """

    def __init__(self, prefix: str | os.PathLike, metadata: dict[str, Value], tensors: Sequence[TensorInfo],
                 shards: Sequence[Sequence[TensorInfo]]):
        if [tensor for shard in shards for tensor in shard] != list(tensors):
            raise IqforgeError("the shards do not hold the tensors in their order", file=prefix)
        if not 0 < len(shards) <= shard_rules.MAX_SHARDS:
            raise OutputError(f"{len(shards)} shards; a model can be split into 1 to {shard_rules.MAX_SHARDS}", file=prefix)
        self.paths = tuple(shard_rules.shard_path(prefix, index, len(shards)) for index in range(len(shards)))
        self._shards = [((metadata if index == 0 else {}) | shard_rules.split_keys(index, len(shards), len(tensors)), list(shard))
                        for index, shard in enumerate(shards)]
        layouts = [FileLayout(path, *shard) for path, shard in zip(self.paths, self._shards)]
        self.n_bytes = sum(layout.n_bytes for layout in layouts)
        check_space(self.paths[0].resolve().parent, self.n_bytes, self.paths[0])
        self._writers: list[GGUFWriter] = []
        self._done = False
        self._names = [{tensor.name for tensor in shard} for shard in shards]
        self._next()

    def _next(self) -> None:
        """Open the next shard. The first one stays locked until all get their names, the others need no handle."""
        index = len(self._writers)
        try:
            if self._writers:
                self._writers[-1].complete()
                if len(self._writers) > 1:
                    self._writers[-1].park()
            self._writers.append(GGUFWriter(self.paths[index], *self._shards[index]))
        except BaseException:
            self.abort()
            raise

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append the next bytes of `tensor`; raises as GGUFWriter.write."""
        if self._done:
            raise IqforgeError("the writer was finished or aborted", file=self.paths[0], tensor=tensor.name)
        while tensor.name not in self._names[len(self._writers) - 1] and len(self._writers) < len(self._shards):
            self._next()
        self._writers[-1].write(tensor, data)

    def finish(self) -> None:
        """Check all shards, then rename them, the first one last: without it the others are not a model."""
        if self._done:
            return
        try:
            while len(self._writers) < len(self._shards):
                self._next()
            self._writers[-1].complete()
            self._writers[0].remove_older()  # it must not be found together with newer other shards
            for writer in reversed(self._writers):
                writer.commit()
            self._done = True
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove what is unfinished; does nothing after `finish`."""
        self._done = True
        for writer in self._writers:
            writer.abort()

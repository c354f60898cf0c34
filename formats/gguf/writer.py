"""Write GGUF files as sinks. The layout is known before the first byte, data is streamed, and the
file gets its name only when it is complete.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...errors import IqforgeError, OutputError
from ..output import PartFile, check_space, size_on_disk
from ..source import TensorInfo
from ..values import Value
from . import shards as shard_rules
from .header import pad_to
from .layout import FileLayout
from .reader import SingleFile

_PIECE = 64 << 20  # bytes per write call, so that Ctrl-C is answered
# trusted(tensor, its bytes in pieces) returns whether an earlier run left the right bytes.
Trusted = Callable[[TensorInfo, Iterator[bytes]], bool]


class _Finishing(ABC):
    """A sink that finishes at the end of a `with` block and aborts on any exception."""

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()


class GGUFWriter(_Finishing):
    """A `Sink` for one GGUF file (version 3). Tensors are laid out and must be written in the order
    of `tensors`.

    `alignment` of tensor data in bytes: by default what `general.alignment` in `metadata` says,
    else 32; an explicit value other than 32 becomes that key. The header is parsed back by our own
    reader before anything is written and once more from the disk before the file gets its name.
    Missing disk space is an OutputError at once. As a context manager it finishes at the end and
    aborts on any exception.
    """

    _part: PartFile | None = None

    def __init__(
        self,
        path: str | os.PathLike,
        metadata: dict[str, Value],
        tensors: Sequence[TensorInfo],
        alignment: int | None = None,
        keep: bool = False,
    ):
        """keep: begin with a call of `resume`."""
        self.path = Path(path)
        self._plan = FileLayout(path, metadata, tensors, alignment)
        self._part = PartFile(path, self._plan.n_bytes, keep)
        self._index, self._written = 0, 0
        if not keep:
            self._begin()

    @property
    def _file(self) -> PartFile:
        if self._part is None:
            raise IqforgeError("the writer was finished or aborted", file=self.path)
        return self._part

    def _begin(self) -> None:
        try:
            self._file.write(self._plan.header)
        except BaseException:
            self.abort()
            raise

    def resume(self, trusted: Trusted) -> int:
        """Take over the tensors that an earlier run left, up to the first that is incomplete or
        that `trusted` refuses; what follows them is cut off. Return their number.
        """
        part, plan, count = self._file, self._plan, 0
        if part.read_kept(0, len(plan.header)) == plan.header:
            while count < len(plan.tensors) and trusted(plan.tensors[count], self._kept(count)):
                count += 1
        if count == 0:
            part.continue_at(0)
            self._begin()
        else:
            self._index = count
            self.cut()
        return count

    def _kept(self, index: int) -> Iterator[bytes]:
        start = self._plan.offsets[index]
        stop = start + self._plan.tensors[index].n_bytes
        for at in range(start, stop, _PIECE):
            yield self._file.read_kept(at, min(_PIECE, stop - at))

    def cut(self) -> None:
        """Drop the bytes of a tensor that is not complete."""
        end = len(self._plan.header)
        if self._index:
            end = pad_to(
                self._plan.offsets[self._index - 1] + self._plan.tensors[self._index - 1].n_bytes,
                self._plan.alignment,
            )
        self._file.continue_at(end)
        self._written = 0

    @property
    def n_bytes(self) -> int:
        """The size of the finished file."""
        return self._plan.n_bytes

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append the next bytes of `tensor`, as any C-contiguous array. Raise IqforgeError if it is
        not this tensor's turn or if the bytes are more than its type and shape take; OutputError if
        they cannot be written.
        """
        if self._part is None:
            raise IqforgeError(
                "the writer was finished or aborted", file=self.path, tensor=tensor.name
            )
        expected = self._expected(tensor)
        data = np.ascontiguousarray(data)
        if self._written + data.nbytes > expected.n_bytes:
            raise IqforgeError(
                f"got {self._written + data.nbytes} bytes, shape {list(expected.shape)} in"
                f" {expected.type} takes {expected.n_bytes}",
                file=self.path,
                tensor=tensor.name,
            )
        flat = data.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _PIECE):
            self._part.write(flat[start : start + _PIECE])
        self._written += data.nbytes
        if self._written == expected.n_bytes:
            self._index, self._written = self._index + 1, 0
            self._pad()

    def finish(self) -> None:
        """Sync, check the header on the disk, rename. Raise IqforgeError if a tensor is missing or
        incomplete.
        """
        if self._part is None:
            return
        try:
            self.complete()
            self._file.commit()
        finally:
            self.abort()

    def complete(self) -> None:
        """Do everything of `finish` except renaming."""
        if self._index < len(self._plan.tensors):
            expected = self._plan.tensors[self._index]
            raise IqforgeError(
                f"finished with {self._written} of {expected.n_bytes} bytes, tensor"
                f" {self._index + 1} of {len(self._plan.tensors)}",
                file=self.path,
                tensor=expected.name,
            )
        self._file.sync()
        written = SingleFile(self._file.part_path)
        try:
            self._plan.check(written.header)
        finally:
            written.close()

    def park(self) -> None:
        """Give the file handle back after `complete`."""
        self._file.park()

    def sync(self) -> None:
        """Make what is written so far survive a power cut. May be called from another thread."""
        self._file.sync()

    def leave(self) -> None:
        """Keep the unfinished file so that a later run can resume it with `keep`. Nothing more can
        be written.
        """
        part, self._part = self._part, None
        if part is not None:
            part.leave()

    def remove_older(self) -> None:
        """Delete the file that has the final name so far."""
        self._file.remove_older()

    def commit(self) -> None:
        """Rename, as `finish` does after `complete`."""
        self._file.commit()
        self._part = None

    def abort(self) -> None:
        """Remove the unfinished file; does nothing after `finish`."""
        part, self._part = self._part, None
        if part is not None:
            part.abort()

    def __del__(self) -> None:
        if self._part is not None:
            self.abort()

    def _expected(self, tensor: TensorInfo) -> TensorInfo:
        if self._index == len(self._plan.tensors):
            raise IqforgeError(
                f"all {len(self._plan.tensors)} tensors are written already",
                file=self.path,
                tensor=tensor.name,
            )
        expected = self._plan.tensors[self._index]
        if tensor != expected:
            raise IqforgeError(
                f"written out of turn as {list(tensor.shape)} in {tensor.type}; next is"
                f" '{expected.name}', {list(expected.shape)} in {expected.type}",
                file=self.path,
                tensor=tensor.name,
            )
        return expected

    def _pad(self) -> None:
        position = self._file.position
        self._file.write(bytes(pad_to(position, self._plan.alignment) - position))


class ShardedWriter(_Finishing):
    """A `Sink` for a split model: `<prefix>-00001-of-0000N.gguf` and so on, each shard complete
    before the next begins.

    `shards` lists the tensors of each shard, together `tensors` in order. The first shard gets
    `metadata` and the split keys (in place where `metadata` has them), the others only the split
    keys. No shard has its name before `finish`; an abort removes all of them.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        metadata: dict[str, Value],
        tensors: Sequence[TensorInfo],
        shards: Sequence[Sequence[TensorInfo]],
        keep: bool = False,
        skip: Collection[int] = (),
    ):
        """keep: begin with a call of `resume`. skip: numbers of shards, from 0, that already exist
        and are kept; their tensors are not written.
        """
        if [tensor for shard in shards for tensor in shard] != list(tensors):
            raise IqforgeError("the shards do not hold the tensors in their order", file=prefix)
        if not 0 < len(shards) <= shard_rules.MAX_SHARDS:
            raise OutputError(
                f"{len(shards)} shards; a model can be split into 1 to {shard_rules.MAX_SHARDS}",
                file=prefix,
            )
        self.paths = tuple(
            shard_rules.shard_path(prefix, index, len(shards)) for index in range(len(shards))
        )
        self._shards = [
            (
                path,
                (metadata if index == 0 else {})
                | shard_rules.split_keys(index, len(shards), len(tensors)),
                list(shard),
            )
            for index, (path, shard) in enumerate(zip(self.paths, shards))
            if index not in skip
        ]
        layouts = [FileLayout(*shard) for shard in self._shards]
        self.n_bytes = sum(layout.n_bytes for layout in layouts)
        kept = sum(size_on_disk(f"{path}.part") for path, _, _ in self._shards) if keep else 0
        check_space(self.paths[0].resolve().parent, self.n_bytes - kept, self.paths[0])
        self._writers: list[GGUFWriter] = []
        self._done = False
        self._names = [{tensor.name for tensor in shard} for _, _, shard in self._shards]
        self._with_first = 0 not in skip
        self._turn = threading.Lock()  # of `sync` and of what closes files
        if not keep:
            self._next()

    def _next(self, keep: bool = False) -> None:
        """Open the next shard. The first one stays locked until all get their names, the others
        need no handle.
        """
        index = len(self._writers)
        if self._writers:
            self._writers[-1].complete()
        with self._turn:
            if len(self._writers) > 1:
                self._writers[-1].park()
            self._writers.append(GGUFWriter(*self._shards[index], keep=keep))

    def resume(self, trusted: Trusted) -> int:
        """Resume as `GGUFWriter.resume` does, shard by shard; the shards after the first incomplete
        one are written again.
        """
        count = 0
        while len(self._writers) < len(self._shards):
            self._next(keep=True)
            taken = self._writers[-1].resume(trusted)
            count += taken
            if taken < len(self._shards[len(self._writers) - 1][2]):
                break
        return count

    def sync(self) -> None:
        """Do what `GGUFWriter.sync` does. Complete shards are synced already."""
        with self._turn:
            self._writers[-1].sync()

    def cut(self) -> None:
        """Drop the bytes of a tensor that is not complete."""
        self._writers[-1].cut()

    def leave(self) -> None:
        """Keep the unfinished files, as `GGUFWriter.leave` does."""
        self._done = True
        for writer in self._writers:
            writer.leave()

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Append the next bytes of `tensor`. Raise the errors of `GGUFWriter.write`."""
        if self._done:
            raise IqforgeError(
                "the writer was finished or aborted", file=self.paths[0], tensor=tensor.name
            )
        while tensor.name not in self._names[len(self._writers) - 1] and len(self._writers) < len(
            self._shards
        ):
            self._next()
        self._writers[-1].write(tensor, data)

    def finish(self) -> None:
        """Check all shards, then rename them, the first one last, as the others are not a model
        without it.
        """
        if self._done:
            return
        try:
            self.complete()
            self.commit()
        finally:
            self.abort()

    def complete(self) -> None:
        """Do everything of `finish` except renaming."""
        while len(self._writers) < len(self._shards):
            self._next()
        self._writers[-1].complete()

    def commit(self) -> None:
        """Rename all shards, as `finish` does after `complete`."""
        if self._with_first:
            self._writers[0].remove_older()  # it must not be found next to newer shards
        for writer in reversed(self._writers):
            writer.commit()
        self._done = True

    def abort(self) -> None:
        """Remove what is unfinished; does nothing after `finish`."""
        self._done = True
        for writer in self._writers:
            writer.abort()

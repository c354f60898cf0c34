"""Write GGUF files as sinks. The layout is known before the first byte, data is streamed, and the
file gets its name only when it is complete.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...errors import IqforgeError
from ..output import PartFile
from ..source import TensorInfo
from ..values import Value
from .header import pad_to
from .layout import FileLayout
from .reader import SingleFile

_PIECE = 64 << 20  # bytes per write call, so that Ctrl-C is answered
# trusted(tensor, its bytes in pieces) returns whether an earlier run left the right bytes.
Trusted = Callable[[TensorInfo, Iterator[bytes]], bool]


class FinishingSink(ABC):
    """A sink that finishes at the end of a `with` block and aborts on any exception."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the file and give it its name."""

    @abstractmethod
    def abort(self) -> None:
        """Close the file without giving it its name."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.abort()


class GGUFWriter(FinishingSink):
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

    def stored(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor that is written completely, uint8[n_rows, row_bytes], mapped
        from the unfinished file. Raise IqforgeError if it is not written yet.
        """
        plan = self._plan
        written = (
            at for at, tensor in enumerate(plan.tensors[: self._index]) if tensor.name == name
        )
        if (index := next(written, None)) is None:
            raise IqforgeError("is not written yet", file=self.path, tensor=name)
        tensor = plan.tensors[index]
        shape = tensor.n_rows, tensor.type.row_bytes(tensor.n_cols)
        return np.memmap(
            self._file.part_path, np.uint8, "r", offset=plan.offsets[index], shape=shape
        )

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
        """Do everything of `finish` except renaming. Raise IqforgeError if a tensor is missing."""
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

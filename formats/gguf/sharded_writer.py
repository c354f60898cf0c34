"""Write split models as sinks, shard by shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence

import numpy as np

from ...errors import IqforgeError, OutputError
from ..disk import check_space, size_on_disk
from ..source import TensorInfo
from ..values import Value
from . import shards as shard_rules
from .layout import FileLayout
from .writer import FinishingSink, GGUFWriter, Trusted


class ShardedWriter(FinishingSink):
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

    def stored(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor that is written, as `GGUFWriter.stored` does. Raise
        IqforgeError if it is not written yet.
        """
        shard = next((at for at, names in enumerate(self._names) if name in names), 0)
        if shard >= len(self._writers):
            raise IqforgeError("is not written yet", file=self.paths[0], tensor=name)
        return self._writers[shard].stored(name)

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

"""A checkpoint that stays on a server. Small files are fetched once; of the weights, first the
headers and then only the requested rows.

Ranges are fetched in blocks of a tensor over several connections, a few blocks ahead. Each block is
fetched once for all threads that wait for it and stays in a cache of bounded size, because several
rows of a block may be requested in turn.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np

from ...errors import RemoteError, TruncatedFileError, UnsupportedTypeError
from ..checkpoint.folder import Checkpoint
from ..checkpoint.safetensors import parse_header
from ..checkpoint.shards import SAFETENSORS, collect_tensors, find_weight_files
from ..tensors.stored import StoredTensor
from .repository import Address, Repository

BLOCK_BYTES = 4 << 20
CACHE_BYTES = 192 << 20
CONNECTIONS = 16
READ_AHEAD = 2  # blocks

_SMALL_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
_MAX_SMALL_FILE = 256 << 20
_HEADER_GUESS = 256 << 10  # read at once; most headers fit


def open_remote(address: str) -> RemoteCheckpoint:
    """Open the checkpoint in the repository `organization/model[@revision]`. Raise UsageError,
    NotFoundError, RemoteError or ConfigError.
    """
    repository = Repository(Address.parse(address))
    kept = tempfile.TemporaryDirectory(prefix="iqforge-")
    try:
        return RemoteCheckpoint(repository, kept)
    except BaseException:
        repository.client.stop()
        kept.cleanup()
        raise


class RemoteCheckpoint(Checkpoint):
    """A checkpoint whose `path` is a temporary folder with all files but the weights."""

    parallel_reads = CONNECTIONS

    def __init__(self, repository: Repository, kept: tempfile.TemporaryDirectory):
        self.repository, self._kept = repository, kept
        self._folder = Path(kept.name) / repository.name
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="remote")
        try:
            self._fetch_small_files()
            super().__init__(self._folder)
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise
        self._storage = RemoteFiles(repository, self._pool)

    @property
    def default_output(self) -> Path:
        """`organization-model` in the working folder, without type and suffix."""
        return Path(self.repository.name.replace("/", "-"))

    def _fetch_small_files(self) -> None:
        names = [
            name
            for name in self.repository.files
            if name.endswith(_SMALL_FILES)
            and ("/" not in name or name.startswith("additional_chat_templates/"))
        ]
        self._folder.mkdir(parents=True)
        for name, data in zip(
            names, self._pool.map(lambda name: self.repository.get(name, _MAX_SMALL_FILE), names)
        ):
            (self._folder / name).parent.mkdir(exist_ok=True)
            (self._folder / name).write_bytes(data)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        names = {name for name in self.repository.files if "/" not in name}
        layout = find_weight_files(names, Path(self.repository.label()))
        if layout is not SAFETENSORS:
            raise UnsupportedTypeError(
                "has no safetensors files; PyTorch files cannot be read in ranges, download them"
                " and convert the folder",
                file=self.repository.label(),
            )
        return collect_tensors(
            self._folder, names, layout, lambda files: self._pool.map(self._header, files)
        )

    def _header(self, name: str) -> dict[str, StoredTensor]:
        head = _Head(self.repository, name)
        return parse_header(head, Path(self.repository.label(name)), head.size)

    def close(self) -> None:
        """Stop all downloads and remove the temporary folder."""
        self.repository.client.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()
        self._kept.cleanup()


class _Head:
    """The beginning of a remote file as a file object. Further bytes are fetched on demand."""

    def __init__(self, repository: Repository, name: str):
        self._repository, self._name, self._position = repository, name, 0
        first = repository.get_range(name, 0, _HEADER_GUESS)
        self._data, self.size = first.data, first.size

    def read(self, n_bytes: int) -> bytes:
        stop = min(self._position + n_bytes, self.size)
        if stop > len(self._data):
            self._data += self._repository.get_range(self._name, len(self._data), stop).data
        data = self._data[self._position : stop]
        self._position += len(data)
        return data


class RemoteFiles:
    """Ranges that are fetched on demand. `fetched`: bytes so far."""

    def __init__(self, repository: Repository, pool: ThreadPoolExecutor):
        self._repository, self._pool = repository, pool
        self._lock = threading.Lock()
        # Least recently used first.
        self._blocks: OrderedDict[tuple[Path, int], Future[np.ndarray]] = OrderedDict()
        self.fetched = 0

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Return bytes start..stop of a tensor's data, uint8[stop - start]. Blocks after them are
        fetched ahead. Raise RemoteError if reading is stopped meanwhile.
        """
        if start >= stop:
            return np.empty(0, np.uint8)
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        count = -(-(tensor.end - tensor.begin) // BLOCK_BYTES)
        try:
            if first == last:
                futures = self._ask(tensor, range(first, min(last + 1 + READ_AHEAD, count)))
                return futures[0].result()[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]
            out = np.empty(stop - start, np.uint8)
            for number, future in self._in_turn(tensor, first, last, count):
                begin = number * BLOCK_BYTES
                block = future.result()[max(start - begin, 0) : stop - begin]
                at = max(begin, start) - start
                out[at : at + len(block)] = block
            return out
        except CancelledError:
            raise RemoteError(
                "reading was stopped before it was complete", file=tensor.file, tensor=tensor.name
            ) from None

    def _in_turn(
        self, tensor: StoredTensor, first: int, last: int, count: int
    ) -> Iterator[tuple[int, Future[np.ndarray]]]:
        """Yield blocks `first` to `last`, with at most as many requested at a time as there are
        connections.
        """
        for number in range(first, last + 1):
            futures = self._ask(
                tensor,
                range(
                    number, min(max(last + 1, number + 1 + READ_AHEAD), number + CONNECTIONS, count)
                ),
            )
            yield number, futures[0]

    def _ask(self, tensor: StoredTensor, numbers: range) -> list[Future[np.ndarray]]:
        futures = []
        with self._lock:
            for number in numbers:
                key = (tensor.file, tensor.begin + number * BLOCK_BYTES)
                future = self._blocks.get(key)
                if future is None or (
                    future.done() and (future.cancelled() or future.exception() is not None)
                ):
                    try:
                        future = self._blocks[key] = self._pool.submit(self._fetch, tensor, number)
                    except RuntimeError:  # the pool was shut down
                        raise RemoteError(
                            "the checkpoint was closed", file=tensor.file, tensor=tensor.name
                        ) from None
                self._blocks.move_to_end(key)
                futures.append(future)
            for key in list(self._blocks)[: max(0, len(self._blocks) - CACHE_BYTES // BLOCK_BYTES)]:
                if self._blocks[key].done():
                    del self._blocks[key]
        return futures

    def _fetch(self, tensor: StoredTensor, number: int) -> np.ndarray:
        begin = tensor.begin + number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, tensor.end)
        part = self._repository.get_range(tensor.file.name, begin, end)
        if len(part.data) < end - begin:
            raise TruncatedFileError(
                f"its data ends at {end}, the file has {part.size} bytes",
                file=tensor.file,
                tensor=tensor.name,
            )
        with self._lock:
            self.fetched += len(part.data)
        return np.frombuffer(part.data, np.uint8)

    def release(self, tensor: StoredTensor) -> None:
        """Do nothing: readers may be ahead in this tensor, and the cache is bounded."""

    def close(self) -> None:
        """Drop the blocks that were fetched."""
        with self._lock:
            self._blocks.clear()

"""Where a trial writes to: a file without a name, on the disk that the outputs will be on."""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np

from ..formats.output import WRITE_BEHIND, begin_writing
from ..formats.source import TensorInfo

_LARGEST = 256 << 20  # bytes of the file; then it is written over from its start
_PROBE = 32 << 20


class Scratch:
    """A `Sink` for anything, which keeps nothing. folder: where the file lies; where none can be made there, or without a folder, bytes
    are dropped. written_at: when something was written."""

    def __init__(self, folder: str | None):
        self.written_at: list[float] = []
        self._position = self._begun = 0
        try:
            self._file = None if folder is None else tempfile.TemporaryFile(dir=folder, buffering=0)
        except OSError:  # the run itself says what is wrong with the folder
            self._file = None

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        if self._file is not None:
            self._write(memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
        self.written_at.append(time.perf_counter())

    def _write(self, view: memoryview) -> None:
        if self._position + len(view) > _LARGEST:
            self._position = self._begun = self._file.seek(0)
        while view:
            done = self._file.write(view)
            self._position, view = self._position + done, view[done:]
        if self._position - self._begun >= WRITE_BEHIND:
            begin_writing(self._file.fileno(), self._begun, self._position)
            self._begun = self._position

    def seconds_for(self, n_bytes: int) -> tuple[float, float]:
        """(seconds the disk takes for so many bytes, seconds after the last of them was given to it), by writing a few; zeros without a
        file."""
        if self._file is None:
            return 0.0, 0.0
        os.fsync(self._file.fileno())
        probe = min(n_bytes, _PROBE)
        block = np.random.default_rng(1).integers(0, 256, min(probe, 1 << 20), dtype=np.uint8)
        started = time.perf_counter()
        for start in range(0, probe, 1 << 20):
            self._write(memoryview(block[: probe - start]))
        os.fsync(self._file.fileno())
        spent = time.perf_counter() - started
        return spent * n_bytes / max(probe, 1), spent

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

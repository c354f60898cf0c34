"""Where a trial writes to: a file without a name, on the disk that the outputs will be on."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time

import numpy as np

from ...formats.output import WRITE_BEHIND, begin_writing
from ...formats.source import TensorInfo

_LARGEST = (
    256 << 20
)  # bytes of the file, if the disk has four times as many; then it is written over from its start
_PROBE = 32 << 20


class Scratch:
    """A `Sink` for anything, which keeps nothing. folder: where the file lies; where none can be
    made there, or without a folder, bytes are dropped, and so is what does not fit into a quarter
    of what is free. written_at: when something was written.
    """

    def __init__(self, folder: str | None):
        self.written_at: list[float] = []
        self._position = self._begun = 0
        self._file, self._largest = None, _LARGEST
        with contextlib.suppress(OSError):  # the run itself says what is wrong with the folder
            if folder is not None:
                usage = shutil.disk_usage(folder)
                self._largest = min(_LARGEST, usage.free // 4) if usage.total else _LARGEST
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        if self._file is not None:
            self._write(memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
        self.written_at.append(time.perf_counter())

    def _write(self, view: memoryview) -> None:
        view = view[: self._largest]
        if self._position + len(view) > self._largest:
            self._position = self._begun = self._file.seek(0)
        while view:
            done = self._file.write(view)
            self._position, view = self._position + done, view[done:]
        if self._position - self._begun >= WRITE_BEHIND:
            begin_writing(self._file.fileno(), self._begun, self._position)
            self._begun = self._position

    def seconds_for(self, n_bytes: int) -> tuple[float, float]:
        """(seconds the disk takes for so many bytes, seconds after the last of them was given to
        it), by writing a few; zeros without a file.
        """
        if self._file is None:
            return 0.0, 0.0
        os.fsync(self._file.fileno())
        probe = min(n_bytes, _PROBE, self._largest)
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

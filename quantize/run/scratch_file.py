"""The file that a trial run writes to: unnamed, on the disk that the outputs will be on."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import time
from typing import cast

import numpy as np

from ...formats.output import WRITE_BEHIND, begin_writing
from ...formats.source import TensorInfo

# Bytes of the file, if the disk has four times as many free. Beyond them writing wraps around.
_LARGEST = 256 << 20
_PROBE = 32 << 20


class ScratchFile:
    """A `Sink` that accepts any tensor and keeps nothing.

    folder: the folder of the file. Without a folder, or if the file cannot be made there, all bytes
    are dropped. Bytes beyond a quarter of the free space are dropped too. written_at: the times of
    all writes.
    """

    def __init__(self, folder: str | None):
        self.written_at: list[float] = []
        self._position = self._begun = 0
        self._file: io.FileIO | None = None
        self._largest = _LARGEST
        # The run itself reports what is wrong with the folder.
        with contextlib.suppress(OSError):
            if folder is not None:
                usage = shutil.disk_usage(folder)
                self._largest = min(_LARGEST, usage.free // 4) if usage.total else _LARGEST
                file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (see close)
                self._file = cast(io.FileIO, file)

    def write(self, tensor: TensorInfo, data: np.ndarray) -> None:
        """Write the bytes of a piece and note the time. Without a file only the time is noted."""
        if self._file is not None:
            self._write(self._file, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        self.written_at.append(time.perf_counter())

    def _write(self, file: io.FileIO, view: memoryview) -> None:
        view = view[: self._largest]
        if self._position + len(view) > self._largest:
            self._position = self._begun = file.seek(0)
        while view:
            done = file.write(view)
            self._position, view = self._position + done, view[done:]
        if self._position - self._begun >= WRITE_BEHIND:
            begin_writing(file.fileno(), self._begun, self._position)
            self._begun = self._position

    def seconds_for(self, n_bytes: int) -> tuple[float, float]:
        """Return (seconds the disk takes for `n_bytes`, seconds that it takes after the last
        write), measured by writing a few of them; zeros without a file.
        """
        if self._file is None:
            return 0.0, 0.0
        os.fsync(self._file.fileno())
        probe = min(n_bytes, _PROBE, self._largest)
        block = np.random.default_rng(1).integers(0, 256, min(probe, 1 << 20), dtype=np.uint8)
        started = time.perf_counter()
        for start in range(0, probe, 1 << 20):
            self._write(self._file, block[: probe - start].data)
        os.fsync(self._file.fileno())
        spent = time.perf_counter() - started
        return spent * n_bytes / max(probe, 1), spent

    def close(self) -> None:
        """Close the file, which frees its space."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

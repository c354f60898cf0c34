"""Memory of the host that is page-locked: a device copies from it at the speed of the bus, and the
processor does nothing meanwhile.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import weakref
from collections.abc import Hashable
from contextlib import suppress

import numpy as np
import torch

from ....cuda_kernels.compile.launch import make_current
from ....cuda_kernels.packed.matrix import PackedMatrix
from ....cuda_kernels.packed.pack import pack_rows
from ....formats.types import GGMLType

# Bytes that are copied before they are packed, and buffers of a device for them: several, as the
# next are copied while some are packed.
_PIECE_BYTES, _PIECES = 32 << 20, 4
BUFFER_BYTES = _PIECE_BYTES * _PIECES
_Event = torch.cuda.Event | torch.Event


class LockedMemory:
    """Arrays in memory of the host that a device copies from. They stay in memory, and page-locked,
    until `close`, or until this is gone. IQFORGE_LOCK=0 locks none, for comparisons.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.n_bytes = 0  # page-locked now
        self.refused = ""  # why an array could not be locked, if one could not
        self._arrays: dict[Hashable, tuple[np.ndarray, bool]] = {}  # and whether they are locked
        self._release = weakref.finalize(self, _unlock_all, device, self._arrays)
        self._release.atexit = False

    def lock(self, key: Hashable, array: np.ndarray) -> bool:
        """Lock the pages of a contiguous array, instead of those of the array before with this key;
        return whether they are locked. `refused` says why not.
        """
        held, locked = self._arrays.get(key, (None, False))
        if held is array:
            return locked
        if held is not None and locked:
            _unlock(self.device, held)
            self.n_bytes -= held.nbytes
        self._arrays.pop(key, None)
        unwanted = os.environ.get("IQFORGE_LOCK") == "0"
        reason = "IQFORGE_LOCK is 0" if unwanted else _lock(self.device, array)
        self._arrays[key] = array, not reason
        self.n_bytes += 0 if reason else array.nbytes
        self.refused = reason or self.refused
        return not reason

    def close(self) -> None:
        """Unlock all arrays."""
        self._release()
        self.n_bytes = 0


class Pieces:
    """Copies from page-locked memory, on a stream of their own, so that the bus is never idle while
    the pieces before are packed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: torch.Tensor | None = None
        self._read: list[_Event | None] = [None] * _PIECES  # after what was in each is packed
        self._next = 0

    def allocate(self) -> torch.Tensor:
        """Return the buffers uint8[_PIECES, _PIECE_BYTES], allocated at the first call."""
        if self._buffers is None:
            shape = _PIECES, _PIECE_BYTES
            self._buffers = torch.empty(shape, dtype=torch.uint8, device=self.device)
            # What had the memory before may still be under way.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._buffers

    def pack_into(
        self, matrix: PackedMatrix, type: GGMLType, rows: np.ndarray, stream: torch.cuda.Stream
    ) -> None:
        """Fill a packed matrix with page-locked rows uint8[rows, row_bytes] of its type, on
        `stream`, which is current. The host does not wait.
        """
        n_rows, row_bytes = rows.shape
        buffers = self.allocate()
        step = max(1, _PIECE_BYTES // row_bytes)
        for first in range(0, n_rows, step):
            part = on_host(rows[first : first + step])
            number, self._next = self._next, (self._next + 1) % _PIECES
            with torch.cuda.stream(self._stream):
                if (read := self._read[number]) is not None:
                    self._stream.wait_event(read)
                raw = buffers[number, : part.numel()]
                raw.copy_(part, non_blocking=True)
                copied = self._stream.record_event()
            stream.wait_event(copied)
            pack_rows(type, raw.view(-1, row_bytes), matrix, first)
            self._read[number] = stream.record_event()


def on_host(array: np.ndarray) -> torch.Tensor:
    """Return the bytes of a contiguous array, uint8[bytes], which nobody may change."""
    # Not `from_numpy`, which warns of arrays that cannot be written to.
    return torch.frombuffer(
        (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8
    )


def _lock(device: torch.device, array: np.ndarray) -> str:
    """Return "" or the name of the driver's error."""
    driver = importlib.import_module("cuda.bindings.driver")
    make_current(device)
    (error,) = driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 0)
    return error.name if int(error) else ""


def _unlock(device: torch.device, array: np.ndarray) -> None:
    driver = importlib.import_module("cuda.bindings.driver")
    make_current(device)
    torch.cuda.synchronize(device)  # nothing is copied from it any more
    driver.cuMemHostUnregister(array.ctypes.data)


def _unlock_all(device: torch.device, arrays: dict[Hashable, tuple[np.ndarray, bool]]) -> None:
    with suppress(RuntimeError):  # the context may be gone
        while arrays:
            _, (array, locked) = arrays.popitem()
            if locked:
                _unlock(device, array)

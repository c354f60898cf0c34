"""Memory that the operations of a step share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

LINE = 64  # bytes, of a cache line and of a vector


class Buffer(NamedTuple):
    """float32 in memory: the address, and bytes to the same of the next thread (0: all threads have
    one).
    """

    address: int
    thread_step: int = 0

    def at(self, element: int) -> Buffer:
        """Return the buffer from an element on."""
        return Buffer(self.address + 4 * element, self.thread_step)


class Memory:
    """Buffers, aligned to cache lines, and whatever else operations have the address of."""

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self._held: list[object] = []
        self._named: dict[tuple[str, int], Buffer] = {}

    def bytes(self, n: int) -> int:
        """Return the address of n new bytes, all 0."""
        array = np.zeros(n + LINE, dtype=np.uint8)
        self._held.append(array)
        return -(-array.ctypes.data // LINE) * LINE

    def floats(self, name: str, n: int) -> Buffer:
        """Return the buffer of n elements with this name, which all threads share. Layers use the
        same one after each other.
        """
        if (name, n) not in self._named:
            self._named[name, n] = Buffer(self.bytes(4 * n))
        return self._named[name, n]

    def view(self, buffer: Buffer, n: int) -> np.ndarray:
        """Return float32[n] that shares the memory of a buffer."""
        for held in self._held:
            if isinstance(held, np.ndarray) and held.dtype == np.uint8:
                start = buffer.address - held.ctypes.data
                if 0 <= start <= held.nbytes - 4 * n:
                    return held[start : start + 4 * n].view(np.float32)
        raise ValueError("the buffer is of another memory")

    def own_floats(self, name: str, n: int) -> Buffer:
        """Return the buffer of n elements for each thread with this name."""
        if (name, n) not in self._named:
            step = -(-4 * n // LINE) * LINE
            self._named[name, n] = Buffer(self.bytes(step * self.n_threads), step)
        return self._named[name, n]

    def vector(self, x: torch.Tensor | None) -> int:
        """Return the address of a tensor, or of a copy if it is on a GPU or not float32 and
        contiguous; 0 for None.
        """
        if x is None:
            return 0
        x = x.detach().to("cpu", torch.float32).contiguous()
        self._held.append(x)
        return x.data_ptr()

    def array(self, x: np.ndarray) -> int:
        """Return the address of an array, which is kept."""
        self._held.append(x)
        return x.ctypes.data

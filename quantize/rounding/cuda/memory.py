"""What rounding needs of a device, and arrays on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ....formats.types import GGMLType


class RoundingDevice(Protocol):
    """What rounding needs of a device. `run.cuda_device.CudaDevice` is one."""

    def memory(self, n_bytes: int) -> Any:
        """Return uint8[n_bytes] on the device."""
        ...

    def upload(self, host: np.ndarray, target: Any, stream: Any) -> None:
        """Copy `host` to `target` on the device, in the order of `stream`."""

    def download(self, source: Any, host: np.ndarray, stream: Any) -> None:
        """Copy `source` on the device to `host`, in the order of `stream`; `wait` says when it is
        there.
        """

    def encoder(self, type: GGMLType, n_cols: int, weighted: bool) -> Any:
        """Return the search of rows of `n_cols` columns for a type. weighted: with importances."""
        ...

    def wait(self, stream: Any) -> None:
        """Wait until everything in `stream` is done."""

    def address(self, array: Any) -> int:
        """Return the address of an array on the device."""
        ...

    def launch(self, kernel: str, grid: int, threads: int, stream: Any, *arguments: Any) -> None:
        """Start a kernel of `cuda_kernels.rounding`. arguments: arrays on the device, `From`, None,
        or numpy scalars.
        """
        ...


class Memory:
    """Arrays on a device by name, kept from tensor to tensor and grown as needed."""

    def __init__(self, device: RoundingDevice):
        self.device = device
        self._held: dict[str, Any] = {}
        self._views: dict[tuple, Any] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of this shape; one element where that has none, as kernels take an
        address.
        """
        if 0 in shape:
            shape = (1,)
        key = name, shape, np.dtype(dtype)
        if key in self._views:
            return self._views[key]
        n_bytes = int(np.prod(shape, dtype=np.int64)) * key[2].itemsize
        if name not in self._held or len(self._held[name]) < n_bytes:
            for old in [one for one in self._views if one[0] == name]:
                del self._views[old]
            self._held.pop(name, None)
            self._held[name] = self.device.memory(n_bytes)
        self._views[key] = self._held[name][:n_bytes].view(dtype).reshape(shape)
        return self._views[key]

    def numbered(self, name: str) -> Callable[[tuple[int, ...], Any], Any]:
        """Return new(shape, dtype), which makes the arrays `name 1`, `name 2` and so on: what an
        encoder takes (`CudaEncoder.arrays`).
        """
        numbers = itertools.count(1)
        return lambda shape, dtype: self.array(f"{name} {next(numbers)}", shape, dtype)

    def filled(self, name: str, values: np.ndarray, stream: Any) -> Any:
        """Return the array `name` on the device with the shape, dtype and contents of `values`."""
        values = np.ascontiguousarray(values)
        there = self.array(name, values.shape, values.dtype)
        if values.size:
            self.device.upload(values, there, stream)
        return there

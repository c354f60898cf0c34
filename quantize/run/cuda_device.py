"""One GPU for a streaming run: memory, copies, and the steps before and after a search."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ...cuda_kernels.compile.numba_cuda import cuda_module, named_errors
from ...cuda_kernels.compile.plain_launch import launch_on, load
from ...cuda_kernels.compile.spec import KernelSpec
from ...cuda_kernels.rounding import From, spec_of
from ...errors import DeviceError
from ...formats.types import GGMLType
from ..cuda.device_kernels import MEASURED_PER_PARTIAL, join_kernel, measure_kernel, widen_kernel
from ..encode import device_encoder

DeviceArray = Any  # numba-cuda has no types for its arrays and streams
Stream = Any


@functools.cache
def _rounding_kernels(spec: KernelSpec, device: int) -> dict[str, object]:
    """Return the kernels of a spec by name."""
    return dict(zip(spec.functions, load(spec, device), strict=True))


def _argument(value: Any) -> Any:
    """Return the address of an array or a part of it, null for None, or the number."""
    if value is None:
        return np.uintp(0)
    if isinstance(value, np.generic):
        return value
    array, elements = (value.array, value.elements) if isinstance(value, From) else (value, 0)
    at = array.__cuda_array_interface__["data"][0]
    return np.uintp(at + elements * array.dtype.itemsize)


class DeviceEncoder(Protocol):
    """A search on a device. `CudaEncoder` is one."""

    def arrays(self, rows: int, new: Callable) -> list[DeviceArray]:
        """Return arrays made by `new(shape, dtype)`: x float32 of `rows` rows; the results, uint8,
        in which a type with row headers has these first; scratch. The first axis of each is a
        multiple of `rows`: equal sections of all arrays belong to the same rows.
        """
        ...

    def launch(self, arrays: list[DeviceArray], stream: Stream, weights: DeviceArray) -> None:
        """Start the search on `arrays`, or on equal sections of them, without waiting. weights:
        float32[n_cols] on the device from `encode.prepare_weights`, or None for rows without
        importances.
        """


class CudaDevice:
    """Memory, copies and kernels of GPU `number`. Methods are called inside `with
    device.context():`, from any thread.
    """

    def __init__(self, number: int):
        self.number, self.name = number, f"cuda:{number}"
        self._cuda = cuda_module()
        self._encoders: dict[tuple, DeviceEncoder] = {}
        self._lock = threading.Lock()  # one thread compiles, the others wait for what it made

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Make this GPU the current one inside `with`. Its errors name the GPU."""
        with named_errors(self.name), self._cuda.gpus[self.number]:
            yield

    def stream(self) -> Stream:
        """Return a new stream. Work in one is done in order, beside that of others."""
        return self._cuda.stream()

    def wait(self, stream: Stream) -> None:
        """Wait until everything in `stream` is done."""
        stream.synchronize()

    def pinned(self, n_bytes: int) -> np.ndarray:
        """Return uint8[n_bytes] in pinned host memory, which the device copies without the CPU."""
        return self._allocated(self._cuda.pinned_array, n_bytes, "pinned memory for")

    def memory(self, n_bytes: int) -> DeviceArray:
        """Return uint8[n_bytes] on the device."""
        return self._allocated(self._cuda.device_array, n_bytes, "memory of")

    def _allocated(self, new: Callable, n_bytes: int, what: str) -> np.ndarray:
        from numba.cuda.cudadrv.error import CudaDriverError

        try:
            return new(n_bytes, np.uint8)
        except (MemoryError, CudaDriverError) as error:
            raise DeviceError(
                f"{n_bytes} bytes of {what} {self.name} could not be allocated ({error});"
                " use fewer threads (NTHREADS)"
            ) from None

    def upload(self, host: np.ndarray, target: DeviceArray, stream: Stream) -> None:
        """Copy `host` to `target`, of the same size, in the order of `stream`."""
        target.copy_to_device(host, stream=stream)

    def download(self, source: DeviceArray, host: np.ndarray, stream: Stream) -> None:
        """Copy `source` to `host`, of the same size, in the order of `stream`; `wait` says when it
        is there.
        """
        source.copy_to_host(host, stream=stream)

    def encoder(self, type: GGMLType, n_cols: int, weighted: bool) -> DeviceEncoder:
        """Return the encoder of rows of `n_cols` for the type (see `row_encoder` for an interleaved
        one). If it is `weighted`, each launch passes its weights.
        """
        key = type, n_cols, weighted
        with self._lock:
            if key not in self._encoders:
                importance = np.ones(n_cols, np.float32) if weighted else None
                self._encoders[key] = device_encoder(
                    type, n_cols, importance, self.name, self.stream()
                )
            return self._encoders[key]

    def widen(self, name: str, raw: Any, x: Any, found: Any, stream: Stream) -> None:
        """Convert numbers of the float type `name` to float32. NaN and infinity become 0; `found`,
        int64[2], gets the smallest index and the number of them.
        """
        with self._lock:
            kernel = widen_kernel(name, self.number)
        kernel[2048, 256, stream](raw, x, found)

    def measure(
        self,
        type: GGMLType,
        x: DeviceArray,
        results: list[DeviceArray],
        w: DeviceArray,
        rows_per_matrix: int,
        partials: DeviceArray,
        stream: Stream,
    ) -> None:
        """Write sums (see SUMS) over groups of MEASURED_PER_PARTIAL blocks to partials
        float64[groups, SUMS].

        x float32[blocks, block_size]; results: headers, if the type has them, and blocks, as an
        encoder leaves them; w float32[matrices, blocks per row, block_size].
        """
        with self._lock:
            kernel = measure_kernel(type, self.number)
        bodies = results[-1].reshape(len(x), type.block_bytes)
        kernel[len(partials), MEASURED_PER_PARTIAL, stream](
            x, *results[:-1], bodies, w, rows_per_matrix, partials
        )

    def join(self, heads: Any, bodies: Any, out: Any, stream: Stream) -> None:
        """Join headers and blocks into rows uint8[rows, row_bytes]."""
        with self._lock:
            kernel = join_kernel(self.number)
        kernel[2048, 256, stream](heads, bodies.reshape(len(out), -1), out)

    def address(self, array: DeviceArray) -> int:
        """Return where an array is."""
        return int(_argument(array))

    def launch(
        self, kernel: str, grid: int, threads: int, stream: Stream, *arguments: DeviceArray
    ) -> None:
        """Start a kernel of `cuda_kernels.rounding`. arguments: arrays on the device, `From`,
        None for a null pointer, or numpy scalars.
        """
        with self._lock:
            found = _rounding_kernels(spec_of(kernel), self.number)[kernel]
        launch_on(int(stream) if stream else 0, found, grid, threads, *map(_argument, arguments))

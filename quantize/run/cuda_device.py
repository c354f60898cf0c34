"""One GPU for a streaming run: memory, copies, and the steps before and after a search.

Before a search the source's numbers become float32 and are checked. After it the result is decoded,
by the functions that the CPU decodes with, and compared with the source. All sums are taken in a
fixed order: in a thread over a block, over the threads of a CUDA block pairwise, over CUDA blocks
by the host in their order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ...cuda_kernels.compile.numba_cuda import compile_kernel, cuda_module, named_errors, on_device
from ...cuda_kernels.compile.plain_launch import launch_on, load
from ...cuda_kernels.compile.spec import KernelSpec
from ...cuda_kernels.rounding import From, spec_of
from ...errors import DeviceError
from ...formats.codecs.codec import block_decoder
from ...formats.codecs.scalars import half_to_float
from ...formats.types import GGMLType
from ..encode import device_encoder

# Source types that the device converts to float32, and the dtypes in which they are read.
WIDENED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
}
NONE_FOUND = 1 << 62
SUMS = 6  # sum e^2, sum x^2, sum w e^2, sum w x^2, max |e|, max |x|
MEASURED_PER_PARTIAL = 128  # quantized blocks whose sums one CUDA block adds up
DeviceArray = Any  # numba-cuda has no types for its arrays and streams
Stream = Any
_LARGEST = np.float32(np.finfo(np.float32).max)

_WIDEN = """\
def {name}(raw, x, found):
    for index in range(cuda.grid(1), raw.shape[0], cuda.gridsize(1)):
        value = read(raw[index])
        if not abs(value) <= LARGEST:
            cuda.atomic.min(found, 0, index)
            cuda.atomic.add(found, 1, 1)
            value = float32(0)
        x[index] = value
"""
_MEASURE = """\
def {name}(x, {heads}bodies, w, rows_per_matrix, partials):
    index = cuda.grid(1)
    lane = cuda.threadIdx.x
    sums = cuda.shared.array((THREADS, SUMS), float64)
    values = cuda.local.array(SIZE, float32)
    for i in range(SUMS):
        sums[lane, i] = 0
    if index < bodies.shape[0]:
        row = index // w.shape[1]
        decode(bodies[index], {head}values)
        measure(x[index], w[row // rows_per_matrix, index % w.shape[1]], values, FACTOR, sums[lane])
    half = THREADS // 2
    while half > 0:
        cuda.syncthreads()
        if lane < half:
            for i in range(4):
                sums[lane, i] += sums[lane + half, i]
            for i in range(4, SUMS):
                sums[lane, i] = max(sums[lane, i], sums[lane + half, i])
        half //= 2
    if lane == 0:
        for i in range(SUMS):
            partials[cuda.blockIdx.x, i] = sums[0, i]
"""
_JOIN = """\
def {name}(heads, bodies, out):
    head = heads.shape[1]
    for index in range(cuda.grid(1), out.shape[0] * out.shape[1], cuda.gridsize(1)):
        row = index // out.shape[1]
        column = index % out.shape[1]
        out[row, column] = heads[row, column] if column < head else bodies[row, column - head]
"""


def read_f32(value):
    """Return the float32 as it is. For kernels, as the two below."""
    return value


def read_bf16(bits):
    """Return the bits of a BF16 number, uint16, as float32."""
    return np.uint32(np.int64(bits) << 16).view(np.float32)


def read_f16(bits):
    """Return the bits of an F16 number, uint16, as float32."""
    return half_to_float(np.int64(bits))


def measure_block(x, w, values, factor, sums):
    """Write the sums of one block to float64[SUMS], in double precision, in which no square of a
    float32 overflows.
    """
    e2 = np.float64(0)
    x2 = np.float64(0)
    we2 = np.float64(0)
    wx2 = np.float64(0)
    worst = np.float64(0)
    largest = np.float64(0)
    for i in range(len(x)):
        a = np.float64(x[i])
        e = np.float64(x[i] - values[i] * factor)
        weight = np.float64(w[i])
        e2 += e * e
        x2 += a * a
        we2 += weight * (e * e)
        wx2 += weight * (a * a)
        size = abs(e) if e == e else np.float64(np.inf)
        worst = size if size > worst else worst
        largest = abs(a) if abs(a) > largest else largest
    sums[0] = e2
    sums[1] = x2
    sums[2] = we2
    sums[3] = wx2
    sums[4] = worst
    sums[5] = largest


@functools.cache
def _widen_kernel(name: str, device: int) -> Any:
    from numba.core.types import float32, int64, uint16, void

    read = {"F32": read_f32, "F16": read_f16, "BF16": read_bf16}[name]
    raw = float32[::1] if name == "F32" else uint16[::1]
    name = f"widen_{name.lower()}"
    signature = void(raw, float32[::1], int64[::1])
    return compile_kernel(
        _WIDEN.format(name=name), name, __file__, signature, read=on_device(read), LARGEST=_LARGEST
    )


@functools.cache
def _measure_kernel(type: GGMLType, device: int) -> Any:
    from numba.core.types import float32, float64, int64, uint8, void

    decoder, factor = block_decoder(type, as_weights=True)
    name, head = f"measure_{type.name.lower()}", type.header_bytes > 0
    source = _MEASURE.format(
        name=name, heads="heads, " if head else "", head="heads[row], " if head else ""
    )
    signature = void(
        float32[:, ::1],
        *[uint8[:, ::1]] * (2 if head else 1),
        float32[:, :, ::1],
        int64,
        float64[:, ::1],
    )
    return compile_kernel(
        source,
        name,
        __file__,
        signature,
        decode=on_device(decoder),
        measure=on_device(measure_block),
        FACTOR=factor,
        SIZE=type.block_size,
        THREADS=MEASURED_PER_PARTIAL,
        SUMS=SUMS,
        float64=np.float64,
    )


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


@functools.cache
def _join_kernel(device: int) -> Any:
    from numba.core.types import uint8, void

    return compile_kernel(
        _JOIN.format(name="join_rows"), "join_rows", __file__, void(*[uint8[:, ::1]] * 3)
    )


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
            kernel = _widen_kernel(name, self.number)
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
            kernel = _measure_kernel(type, self.number)
        bodies = results[-1].reshape(len(x), type.block_bytes)
        kernel[len(partials), MEASURED_PER_PARTIAL, stream](
            x, *results[:-1], bodies, w, rows_per_matrix, partials
        )

    def join(self, heads: Any, bodies: Any, out: Any, stream: Stream) -> None:
        """Join headers and blocks into rows uint8[rows, row_bytes]."""
        with self._lock:
            kernel = _join_kernel(self.number)
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

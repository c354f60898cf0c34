"""Kernels of a streaming run: what precedes a search on a GPU, and what follows it.

Before a search the source's numbers become float32 and are checked. After it the result is decoded,
by the functions that the CPU decodes with, and compared with the source. All sums are taken in a
fixed order: in a thread over a block, over the threads of a CUDA block pairwise, over CUDA blocks
by the host in their order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...cuda_kernels.compile.numba_cuda import compile_kernel, on_device
from ...formats.codecs.codec import block_decoder
from ...formats.codecs.scalars import half_to_float
from ...formats.types import GGMLType

# Source types that the device converts to float32, and the dtypes in which they are read.
WIDENED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
}
NONE_FOUND = 1 << 62
SUMS = 6  # sum e^2, sum x^2, sum w e^2, sum w x^2, max |e|, max |x|
MEASURED_PER_PARTIAL = 128  # quantized blocks whose sums one CUDA block adds up
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
def widen_kernel(name: str, device: int) -> Any:
    """Return the kernel run(raw, x, found) that widens numbers of the float type `name`; see
    `CudaDevice.widen`.
    """
    from numba.core.types import float32, int64, uint16, void

    read = {"F32": read_f32, "F16": read_f16, "BF16": read_bf16}[name]
    raw = float32[::1] if name == "F32" else uint16[::1]
    name = f"widen_{name.lower()}"
    signature = void(raw, float32[::1], int64[::1])
    return compile_kernel(
        _WIDEN.format(name=name), name, __file__, signature, read=on_device(read), LARGEST=_LARGEST
    )


@functools.cache
def measure_kernel(type: GGMLType, device: int) -> Any:
    """Return the kernel run(x, [heads,] bodies, w, rows_per_matrix, partials) that measures errors
    of a type; see `CudaDevice.measure`.
    """
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
def join_kernel(device: int) -> Any:
    """Return the kernel run(heads, bodies, out) that joins row headers and blocks."""
    from numba.core.types import uint8, void

    return compile_kernel(
        _JOIN.format(name="join_rows"), "join_rows", __file__, void(*[uint8[:, ::1]] * 3)
    )

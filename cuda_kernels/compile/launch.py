"""Load compiled kernels once per device, and launch them on torch's current stream.

    kernel = function(SPEC, "dequantize_bf16", weights.device)
    launch(kernel, grid, 256, weights, out, np.int64(rows), np.int32(cols))

A launch does not synchronize and allocates nothing, so it can be captured into a
torch.cuda.CUDAGraph. With `pdl=True` the kernel may start before the previous one has ended
(programmatic dependent launch). It must execute `griddepcontrol.wait` before it touches what the
previous kernel writes. The flag is left out on architectures before sm_90, and with IQFORGE_PDL=0,
for comparisons.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np
import torch

from ...errors import DeviceError
from .nvrtc import compile_spec, cuda_core, cuda_error
from .plain_launch import launch_config, stream_of
from .spec import KernelSpec

# Bytes of shared memory that a launch may ask for without an attribute of the kernel: a block has
# 48 KiB then, its own fixed arrays included.
_SHARED_BY_DEFAULT = 32 * 1024


@functools.cache
def architecture(device: int) -> str:
    """Return the architecture of a CUDA device, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def device_index(device: torch.device | int | str) -> int:
    """Return the number of a CUDA device; the current one where it has none."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def make_current(device: torch.device | int | str) -> None:
    """Let calls of the driver in this thread use the context of a device, which torch shares."""
    index = device_index(device)
    with torch.cuda.device(index):
        torch.cuda.current_stream()  # torch makes the context
        cuda_core().Device(index).set_current()


def function(spec: KernelSpec, name: str, device: torch.device | int | str) -> object:
    """Return the kernel `name` of `spec` on a device, a cuda.core.Kernel. Compiled and loaded on
    first use, then kept.
    """
    return _function(spec, name, device_index(device))


@functools.cache
def _module(spec: KernelSpec, device: int) -> Any:
    return compile_spec(spec, architecture(device))


@functools.cache
def _function(spec: KernelSpec, name: str, device: int) -> object:
    make_current(device)
    with torch.cuda.device(device):
        kernel = _module(spec, device).get_kernel(name)
        # All kernels request the same division of a multiprocessor's memory into L1 and shared
        # memory. If two consecutive kernels want different ones, the second waits until every block
        # of the first has left the multiprocessor.
        _set_attribute(kernel, "PREFERRED_SHARED_MEMORY_CARVEOUT", 100, device)
        return kernel


def launch(
    kernel: object,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    *args: object,
    shared: int = 0,
    pdl: bool = False,
    cluster: int | tuple[int, ...] | None = None,
    cooperative: bool = False,
) -> None:
    """Launch on torch's current stream of the current device.

    args: tensors (passed as pointers; they must be on the current device), numpy scalars (passed by
    value, in their own width), None (a null pointer), or other arguments that cuda.core takes
    (tensor maps). shared: bytes of dynamic shared memory. cluster: blocks per cluster; `grid` still
    counts blocks. Raise DeviceError if the launch is refused.
    """
    core = cuda_core()
    # With a number: torch takes longer to find the current device by itself than for the rest.
    stream = torch.cuda.current_stream(torch.cuda.current_device())
    if shared > _SHARED_BY_DEFAULT:
        _allow_shared(kernel, shared)
    overlapping = pdl and _overlaps(stream.device_index)
    config = launch_config(
        _triple(grid),
        _triple(block),
        shared,
        overlapping,
        cluster and _triple(cluster),
        cooperative,
    )
    try:
        core.launch(stream_of(stream.cuda_stream), config, kernel, *map(_argument, args))
    except cuda_error() as error:
        raise DeviceError(
            f"cuda:{stream.device_index}: a kernel could not be launched: {error}"
        ) from error


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    # Bool too; np.float64 is a float.
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        raise TypeError(
            "a number for a kernel has to be a numpy scalar, as its width is taken from it"
        )
    return value


def _triple(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


@functools.cache
def _overlaps(device: int) -> bool:
    return (
        torch.cuda.get_device_capability(device) >= (9, 0) and os.environ.get("IQFORGE_PDL") != "0"
    )


_shared_allowed: dict[tuple[int, int], int] = {}


def _allow_shared(kernel: Any, shared: int) -> None:
    handle, device = int(kernel.handle), torch.cuda.current_device()
    if _shared_allowed.get((handle, device), 0) < shared:
        _set_attribute(kernel, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared, device)
        _shared_allowed[handle, device] = shared


def _set_attribute(kernel: Any, name: str, value: int, device: int) -> None:
    # cuda.core can set attributes only in its newest versions.
    driver = importlib.import_module("cuda.bindings.driver")

    (error,) = driver.cuKernelSetAttribute(
        getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"),
        value,
        kernel.handle,
        device,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            f"cuda:{device}: a kernel cannot have {name.lower()} {value}: {error.name}"
        )

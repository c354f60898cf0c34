"""Find the devices that `--device` names: cpu, auto, or one or several CUDA devices."""

from __future__ import annotations

import logging
import os
import re
import shutil

from ...errors import UsageError

log = logging.getLogger(__name__)
_SPELLING = re.compile(r"cuda(?::(\d{1,4}(?:,\d{1,4})*))?")


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, by its driver's device node or tool.

    It loads no library and may be true where the GPU cannot be used.
    """
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def find_devices(device: str) -> tuple[int, ...]:
    """Return the numbers of the CUDA devices that `device` names; none for the CPU.

    "cpu"; "cuda" for all devices; "cuda:1" or "cuda:0,2" for some; "auto" for all devices if
    numba-cuda is installed and finds one, else the CPU. What "auto" means is logged where the
    machine has an NVIDIA GPU. Raise UsageError for another spelling, a missing device, a device
    named twice, and if CUDA cannot be used.
    """
    if device == "cpu":
        return ()
    match = _SPELLING.fullmatch(device)
    if match is None and device != "auto":
        raise UsageError(f"unknown device '{device}'; use cpu, auto, cuda, cuda:N or cuda:N,M")
    from ...cuda_kernels.compile.numba_cuda import cuda_module

    try:
        count = len(cuda_module().gpus)
    except UsageError as error:
        if device != "auto":
            raise
        if has_nvidia_gpu():
            log.info("the GPU is not used: %s", error.message)
        return ()
    if match is None or match[1] is None:
        if device == "auto":
            log.info("quantizing on %d CUDA device%s", count, "" if count == 1 else "s")
        return tuple(range(count))
    numbers = tuple(int(number) for number in match[1].split(","))
    for number in numbers:
        if number >= count:
            raise UsageError(f"there is no device 'cuda:{number}': {count} CUDA device(s) found")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"'{device}' names a device twice")
    return numbers

"""Compile the plain functions of codecs and searches for CUDA devices, rounding exactly where the
CPU rounds.

The functions are those that `formats.kernel` compiles for the CPU, with the same bound names:
`on_device` copies a function and, through its globals, everything it calls. Three things would make
a GPU compute other bytes. This module prevents them:

- NVVM joins `a*b + c` into one rounding unless told not to. numba-cuda has no option for it, so
  `compile_kernel` sets NVVM's `fma` option while it compiles, and then reads the PTX: an
  instruction that is not IEEE-rounded step by step is an error.
- numba-cuda's float `min` and `max` are the hardware's, which drop a NaN; Python's (and numba's on
  the CPU) keep or drop it by its place. The copies get a `min` and `max` of two arguments with
  Python's meaning.
- `np.floor` and `np.sqrt` of a float32 are missing in numba-cuda; they are added, IEEE-rounded.

Tables that the functions see as constants go to global memory where they are not small: constant
memory serves one address at a time, and the threads of a warp read a table at different places.

Division is IEEE-rounded by default and subnormals are kept, on both machines. numba-cuda is the
extra `iqforge[cuda]`; this module is imported only where a CUDA device is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import DeviceError, UsageError
from ...formats.kernel import share_between_processes, sources_digest
from .nvrtc import cuda_error

# PTX that rounds once where the source rounds twice, approximates, flushes subnormals, or lets the
# assembler choose.
_INEXACT = re.compile(
    r"\b(?:fma|mad)\.(?:[a-z]+\.)*f(?:16|32|64)\b|\.approx\b|\.ftz\b|\b(?:add|sub|mul)\.f(?:32|64)\b"
)
_LARGE_CONSTANT = 128  # bytes
_compiling = threading.local()


@functools.cache
def cuda_module() -> types.ModuleType:
    """Return the module `numba.cuda` of numba-cuda. Raise UsageError if it is not installed, does
    not fit numpy, or finds no device.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        raise UsageError("CUDA devices need the package numba-cuda: pip install 'iqforge[cuda]'")
    if not hasattr(np, "row_stack"):  # which numba-cuda 0.30 uses
        raise UsageError(
            f"CUDA devices need numpy below 2.5, and {np.__version__} is installed: pip install"
            " 'numpy<2.5'"
        )
    from numba import cuda

    if not cuda.is_available():
        raise UsageError(
            "no CUDA device was found (no NVIDIA GPU, no driver, or CUDA's libraries cannot be"
            " loaded)"
        )
    _prepare()
    return cuda


@contextlib.contextmanager
def named_errors(device: str) -> Iterator[None]:
    """Raise errors of CUDA and numba-cuda as a DeviceError that names the device."""
    from numba.cuda.cudadrv.error import CudaDriverError

    try:
        yield
    except (CudaDriverError, cuda_error(), MemoryError) as error:
        raise DeviceError(
            f"{device}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def device_number(device: str) -> int:
    """Return N of "cuda:N", 0 for "cuda". Raise UsageError for another spelling or a missing
    device.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise UsageError(f"unknown device '{device}'; use cpu, cuda or cuda:N")
    number = int(match[1] or 0)
    if number >= (count := len(cuda_module().gpus)):
        raise UsageError(f"there is no device '{device}': {count} CUDA device(s) found")
    return number


def _exact_min(a, b):
    return b if b < a else a


def _exact_max(a, b):
    return b if b > a else a


@functools.cache
def _prepare() -> dict[str, Callable]:
    """Add what numba-cuda lacks, once. Return the replacements that copied functions get under the
    names of other functions.
    """
    from llvmlite import ir
    from numba.core import cgutils
    from numba.core import types as numba_types

    # Type checkers look these up in numba, whose place numba-cuda takes.
    modules: list[Any] = [
        importlib.import_module(f"numba.cuda.{name}")
        for name in ("target", "core.config", "cudadrv.nvvm", "extending")
    ]
    target, config, nvvm, extending = modules

    def lower(function: Callable, intrinsic: str) -> None:
        @extending.lower_builtin(function, numba_types.float32)
        def implementation(context, builder, sig, args):
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, kind, intrinsic), args
            )

    lower(np.floor, "llvm.floor.f32")
    lower(np.sqrt, "llvm.nvvm.sqrt.rn.f")
    compile_ir = nvvm.compile_ir

    def without_contraction(llvmir, **options):
        if getattr(_compiling, "exact", False):
            options["fma"] = False
        return compile_ir(llvmir, **options)

    nvvm.compile_ir = without_contraction
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # small tensors are expected
    in_constant_memory = target.CUDATargetContext.make_constant_array

    def make_constant_array(self, builder, kind, array):
        if array.nbytes < _LARGE_CONSTANT:
            return in_constant_memory(self, builder, kind, array)
        saved, nvvm.ADDRSPACE_CONSTANT = nvvm.ADDRSPACE_CONSTANT, nvvm.ADDRSPACE_GLOBAL
        try:
            return in_constant_memory(self, builder, kind, array)
        finally:
            nvvm.ADDRSPACE_CONSTANT = saved

    target.CUDATargetContext.make_constant_array = make_constant_array
    return {"min": _inlined(_exact_min), "max": _inlined(_exact_max)}


def _inlined(function: Callable) -> Callable:
    from numba import cuda

    # Scratch arrays of a caller become registers only where the callee is part of it.
    return cuda.jit(function, device=True, forceinline=True)


@functools.cache
def on_device(function: Callable) -> Callable:
    """Return `function` (plain, or compiled for the CPU) callable from CUDA kernels; calls of
    compiled functions are copied along.

    A compiled function may have a `device_form`, another one with the same results that suits a GPU
    better: then that is copied.
    """
    function = getattr(function, "device_form", function)
    function = getattr(function, "py_func", function)
    used = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    exact = {name: value for name, value in _prepare().items() if name in used}
    copied = {name: on_device(value) for name, value in used.items() if hasattr(value, "py_func")}
    copy = types.FunctionType(
        function.__code__,
        function.__globals__ | exact | copied,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return _inlined(copy)


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    _compiling.exact = True
    try:
        yield
    finally:
        _compiling.exact = False


def compile_kernel(
    source: str,
    name: str,
    file: str,
    signature: Any,
    max_registers: int | None = None,
    **names: object,
) -> Callable:
    """Return the CUDA kernel `name` that `source` defines, for the current device, with the global
    `names`.

    max_registers: per thread, where more threads at a time are worth more than registers; file: the
    module's own path, next to which numba keeps the compiled code; `name` keys it and must say what
    the functions in `names` are. Raise DeviceError if the compiled code would not round like the
    CPU's.
    """
    from numba import cuda

    namespace: dict[str, Any] = {
        "__name__": __name__,
        "cuda": cuda,
        "float32": np.float32,
    } | names
    exec(compile(source, file, "exec"), namespace)
    function = namespace[name]
    function.__qualname__ = f"{name}-{sources_digest()}"
    # Link-time optimization would join operations after the check below. numba-cuda 0.30 heeds
    # `lto` only in this spelling, not as cuda.jit(lto=False)(function).
    kernel: Any = cuda.jit(function, cache=True, lto=False, max_registers=max_registers)
    share_between_processes(kernel._cache)
    if kernel.targetoptions.get("lto"):
        raise DeviceError(
            "this version of numba-cuda links with optimizations that round otherwise than the CPU"
            " does"
        )
    with _exact():
        kernel.compile(signature)
        ptx = "".join(kernel.inspect_asm().values())
    for compiled in kernel.overloads.values():
        compiled.bind()  # loaded now, and not by several threads at once when they start it
    # Other argument types must not be compiled implicitly, as that would bypass the checks above.
    kernel.disable_compile()
    if found := inexact_instructions(ptx):
        raise DeviceError(
            f"numba-cuda compiled {name} with {', '.join(found)}: its results would differ from the"
            " CPU's"
        )
    return kernel


def inexact_instructions(ptx: str) -> list[str]:
    """Return the instructions of `ptx` that round otherwise than IEEE arithmetic does, operation by
    operation.
    """
    return sorted({match[0] for match in _INEXACT.finditer(ptx)})

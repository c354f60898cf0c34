"""Compile the specs of `spec.py` with NVRTC, and keep the code on disk.

    code = compile_spec(SPEC, "sm_90")  # cuda.core.ObjectCode, which `launch.function` loads

Only this module compiles and caches specs; it locks other processes out meanwhile. It needs no
nvcc, no CUDA headers and no device.

The key of the cache is the whole program after inclusion, the options, NVRTC's version and the
architecture. Files are in $IQFORGE_CACHE_DIR, or iqforge/ in $XDG_CACHE_HOME or ~/.cache. Listing
the cache needs no compiler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import DeviceError, OutputError, UnsupportedTypeError, UsageError
from ...formats.kernel import locked
from ...formats.private_folder import can_be_written, private_folder
from .spec import KernelSpec, expand


def _has_cuda_core() -> bool:
    return (
        importlib.util.find_spec("cuda") is not None
        and importlib.util.find_spec("cuda.core") is not None
    )


def need_cuda_core() -> None:
    """Raise UsageError that says what to install, if nothing can be compiled here."""
    if not _has_cuda_core():
        raise UsageError("CUDA devices need the package cuda-core: pip install 'iqforge[cuda]'")


@functools.cache
def cuda_core() -> Any:
    """Return the module `cuda.core`. Raise UsageError that says what to install without it."""
    need_cuda_core()
    return importlib.import_module("cuda.core")


@functools.cache
def cuda_error() -> type[Exception]:
    """Return the class of errors of the CUDA driver, which cuda.core keeps in a private module."""
    return importlib.import_module("cuda.core._utils.cuda_utils").CUDAError


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    need_cuda_core()
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise DeviceError(
            f"NVRTC, the CUDA compiler library, cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    if status:
        raise DeviceError(f"NVRTC, the CUDA compiler library, does not answer: {status}")
    return major, minor


def cache_folder() -> Path:
    """Return the folder where compiled kernels are kept."""
    if chosen := os.environ.get("IQFORGE_CACHE_DIR"):
        return Path(chosen) / "kernels"
    usual = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "iqforge"
    # Without a home folder "~" stays as it is.
    usable = usual.is_absolute() and can_be_written(usual / "kernels")
    return (usual if usable else private_folder()) / "kernels"


def cache_file(spec: KernelSpec, arch: str) -> Path:
    """Return the file that holds, or would hold, the code of `spec` for `arch`. Raise
    UnsupportedTypeError if the spec is not for it, UsageError without cuda-core.
    """
    return cache_folder() / (_stem(spec, arch) + "-{}.{}.cubin".format(*_nvrtc_version()))


def cached_file(spec: KernelSpec, arch: str) -> Path | None:
    """Return the file with the code of `spec` for `arch`, if there is one: that of the installed
    NVRTC, or without NVRTC that of any version.
    """
    if _has_cuda_core():
        path = cache_file(spec, arch)
        return path if path.exists() else None
    return max(cache_folder().glob(_stem(spec, arch) + "-*.cubin"), default=None)


def is_cached(spec: KernelSpec, arch: str) -> bool:
    """Return whether there is a file with the code of `spec` for `arch`."""
    return cached_file(spec, arch) is not None


def _stem(spec: KernelSpec, arch: str) -> str:
    text = repr((expand(spec.sources), spec.defines, spec.options))
    return f"{spec.name}-{_target(spec, arch)}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def compile_spec(spec: KernelSpec, arch: str) -> Any:
    """Return the code of `spec` for an architecture such as "sm_90", a cuda.core.ObjectCode: from
    the cache, or compiled now.

    Several processes that want the same code at once compile it once. Raise DeviceError if it does
    not compile, UnsupportedTypeError if the spec is not for the architecture, OutputError if the
    cache cannot be written, UsageError without cuda-core.
    """
    path = cache_file(spec, arch)
    code = _load(path)
    if code is None:
        with _lock(path.with_suffix(".lock")):
            code = _load(path)
            if code is None:
                code = _compiled(spec, _target(spec, arch))
                _store(path, code)
    return cuda_core().ObjectCode.from_cubin(code, name=spec.name)


def is_checked(spec: KernelSpec, arch: str) -> bool:
    """Return whether the spec is known to compile."""
    return is_cached(spec, arch) or cache_file(spec, arch).with_suffix(".checked").exists()


def check_spec(spec: KernelSpec, arch: str) -> None:
    """Check that the spec compiles for an architecture. The whole compiler runs, but with little
    optimization, which is several times as fast. No code is kept. Raise the errors of
    `compile_spec`.
    """
    mark = cache_file(spec, arch).with_suffix(".checked")
    if not is_checked(spec, arch):
        _compiled(spec, _target(spec, arch), quick=True)
        with _writing(mark):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _target(spec: KernelSpec, arch: str) -> str:
    if (target := spec.target(arch)) is None:
        raise UnsupportedTypeError(
            f"the kernels {spec.name} are for {', '.join(spec.archs)}, not for {arch}"
        )
    return target


def _load(path: Path) -> bytes | None:
    try:
        code = path.read_bytes()
    except FileNotFoundError:
        return None
    # Files appear complete, so anything else was not written by this package.
    return code if code.startswith(b"\x7fELF") else None


def _compiled(spec: KernelSpec, target: str, quick: bool = False) -> bytes:
    core = cuda_core()
    extra: dict[str, Any] = dict(spec.options)
    # NVRTC cannot combine the quick mode with separate roundings, and older versions of cuda-core
    # have no quick mode.
    known = core.ProgramOptions.__dataclass_fields__
    if quick and extra.get("fma", True) and "ofast_compile" in known:
        # "max" leaves unrolled loops long, which suits much code with few loops, not little code
        # with many
        extra["ofast_compile"] = "max" if spec.sources[-1].startswith("prompt/") else "mid"
    options = core.ProgramOptions(
        name=spec.sources[0], arch=target, define_macro=list(spec.defines) or None, **extra
    )
    try:
        code = bytes(core.Program(expand(spec.sources), "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core's own classes are not public
        log = str(error).replace("\0", "").rstrip()  # NVRTC's log ends in a NUL
        raise DeviceError(f"the kernels {spec.name} do not compile for {target}: {log}") from error
    missing = [name for name in spec.functions if name.encode() not in code]
    if missing:
        raise DeviceError(f"the kernels {spec.name} lack {', '.join(missing)}")
    return code


def _store(path: Path, code: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise OutputError(f"cannot be written: {error.strerror}", file=path) from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the cache of compiled kernels cannot be written: {error.strerror}", file=path
        ) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with _writing(path):
            stack.enter_context(locked(path))
        yield

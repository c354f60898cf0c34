"""List all kernel specs, and compile many of them at once."""

from __future__ import annotations

import fnmatch
import importlib
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType

from ..errors import UsageError
from .compile.nvrtc import (
    cache_folder,
    cached_file,
    check_spec,
    compile_spec,
    is_cached,
    is_checked,
    need_cuda_core,
)
from .compile.spec import ARCHITECTURES, KernelSpec

# Modules of this folder and its sub-folders with a function `specs()`. They are imported when the
# specs are asked for: processes that only compile need none of them.
MODULES = (
    "attention.index",
    "attention.mla",
    "attention.step",
    "matvec.several",
    "matvec.specs",
    "packed.decode",
    "packed.rearrange",
    "peer.links",
    "peer.rows",
    "prompt.attention",
    "prompt.cached",
    "prompt.delta",
    "prompt.kimi_delta",
    "prompt.experts",
    "prompt.few",
    "prompt.flash",
    "prompt.grouped",
    "prompt.mla",
    "prompt.rounded",
    "prompt.rows",
    "prompt.scores",
    "prompt.short_conv",
    "prompt.state_space",
    "rounding",
    "step.between",
    "step.delta",
    "step.kimi_delta",
    "step.offload",
    "step.router",
    "step.sample",
    "step.short_conv",
    "step.state_space",
)


def all_specs(
    more: Mapping[str, Callable[[], Iterable[KernelSpec]]] = MappingProxyType({}),
) -> Iterator[tuple[str, KernelSpec]]:
    """Yield (module, spec) for all specs of MODULES, then of `more`: functions like `specs()` by
    the name of their module.

    Raise RuntimeError if two specs have the same name, as their files would.
    """
    names: dict[str, str] = {}
    ours = {name: importlib.import_module(f".{name}", __package__).specs for name in MODULES}
    for module, specs in (ours | dict(more)).items():
        for spec in specs():
            if spec.name in names:
                raise RuntimeError(
                    f"two kernel specs are named {spec.name}: of {names[spec.name]} and of {module}"
                )
            names[spec.name] = module
            yield module, spec


def chosen_specs(
    names: Sequence[str], specs: list[tuple[str, KernelSpec]]
) -> list[tuple[str, KernelSpec]]:
    """Return the (module, spec) pairs whose names match one of the patterns. Raise UsageError for a
    pattern that matches none.
    """
    for name in names:
        if not any(fnmatch.fnmatchcase(spec.name, name) for _, spec in specs):
            raise UsageError(f"no kernel is named '{name}'")
    return [
        (module, spec)
        for module, spec in specs
        if not names or any(fnmatch.fnmatchcase(spec.name, name) for name in names)
    ]


def architectures(asked: Sequence[str], *, needed: bool) -> list[str]:
    """Return the architectures that are `asked` for; without any those of the devices here, or
    else, if they are not `needed`, all. Raise UsageError for others.
    """
    if asked:
        if wrong := [name for name in asked if not re.fullmatch(r"sm_\d{2,3}", name)]:
            raise UsageError(f"'{wrong[0]}' is not an architecture; they are spelled as sm_90")
        return list(asked)
    import torch

    if torch.cuda.is_available():
        from .compile.launch import architecture

        return sorted({architecture(device) for device in range(torch.cuda.device_count())})
    if needed:
        raise UsageError(
            "there is no CUDA device here: say for which architecture to compile (--arch)"
        )
    return list(ARCHITECTURES)


def missing(specs: Iterable[KernelSpec], archs: Iterable[str]) -> list[tuple[KernelSpec, str]]:
    """Return the specs that are not in the cache, each with the architecture it is missing for."""
    archs = list(archs)
    return [
        (spec, arch)
        for spec in specs
        for arch in archs
        if spec.target(arch) and not is_cached(spec, arch)
    ]


def unchecked(specs: Iterable[KernelSpec], archs: Iterable[str]) -> list[tuple[KernelSpec, str]]:
    """Return the specs that have neither been compiled nor been checked to compile. Raise
    UsageError without cuda-core.
    """
    archs = list(archs)
    return [
        (spec, arch)
        for spec in specs
        for arch in archs
        if spec.target(arch) and not is_checked(spec, arch)
    ]


def build(
    wanted: list[tuple[KernelSpec, str]], jobs: int, *, check: bool = False
) -> Iterator[tuple[KernelSpec, str]]:
    """Compile specs into the cache, or with `check` only find out whether they compile. Yield each
    when it is done, in order. jobs: processes, 0 for one per core.

    Raise the errors of `compile_spec`, and UsageError without cuda-core, even if there is nothing
    to do.
    """
    need_cuda_core()
    jobs = jobs or os.cpu_count() or 1
    one = _check_one if check else _build_one
    if jobs <= 1 or len(wanted) < 2 * jobs:
        yield from map(one, wanted)
        return
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:  # no fork: torch has threads
        try:
            yield from pool.map(one, wanted, chunksize=4)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _build_one(item: tuple[KernelSpec, str]) -> tuple[KernelSpec, str]:
    compile_spec(*item)
    return item


def _check_one(item: tuple[KernelSpec, str]) -> tuple[KernelSpec, str]:
    check_spec(*item)
    return item


def clear() -> tuple[int, int]:
    """Remove everything from the cache. Return the number of compiled modules and their bytes."""
    count = n_bytes = 0
    for path in cache_folder().glob("*"):
        if path.suffix in (".cubin", ".lock", ".part", ".checked"):
            if path.suffix == ".cubin":
                count, n_bytes = count + 1, n_bytes + path.stat().st_size
            path.unlink(missing_ok=True)
    return count, n_bytes


def cached_bytes(spec: KernelSpec, arch: str) -> int | None:
    """Return the size of the compiled spec; None if it is not cached, or not for the
    architecture.
    """
    if not spec.target(arch):
        return None
    path = cached_file(spec, arch)
    return None if path is None else path.stat().st_size

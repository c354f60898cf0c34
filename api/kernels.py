"""List, compile and remove the CUDA kernels of all folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..formats.options import checks_keywords

if TYPE_CHECKING:
    from ..cuda_kernels.compile.spec import KernelSpec


@checks_keywords
def kernel_specs() -> list[tuple[str, KernelSpec]]:
    """Return (module, spec) for every module of CUDA kernels that can be compiled ahead of time."""
    from ..cuda_kernels.registry import all_specs
    from ..quantize.cuda import trellis

    return list(all_specs({"quantize.trellis": trellis.specs}))


@checks_keywords
def build_kernels(
    names: Sequence[str] = (),
    archs: Sequence[str] = (),
    *,
    check: bool = False,
    processes: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[KernelSpec, str]]:
    """Compile CUDA kernels ahead of time into the cache, and return those that were not compiled
    yet, each with its architecture.

    names: patterns such as "matvec_*"; by default all kernels. archs: such as "sm_90"; by default
    those of the devices here. check: only find out whether they compile, which is several times as
    fast; no code is kept. processes: at most, 0 for one per core. progress: called with (done,
    total), first with 0. Raise UsageError for a pattern that matches none, without an architecture,
    and without the package cuda-core.
    """
    from ..cuda_kernels import registry

    if processes < 0:
        raise UsageError(f"processes is {processes}: it must not be negative")
    registry.need_cuda_core()
    specs = [spec for _, spec in registry.chosen_specs(names, kernel_specs())]
    chosen = registry.architectures(archs, needed=True)
    wanted = (registry.unchecked if check else registry.missing)(specs, chosen)
    tell = progress or (lambda done, count: None)
    tell(0, len(wanted))
    for done, _ in enumerate(registry.build(wanted, processes, check=check), 1):
        tell(done, len(wanted))
    return wanted


@checks_keywords
def clear_kernels() -> tuple[int, int]:
    """Remove all compiled CUDA kernels from the cache. Return the number of modules and of
    bytes.
    """
    from ..cuda_kernels.registry import clear

    return clear()

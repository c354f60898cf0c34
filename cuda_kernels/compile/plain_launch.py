"""Load compiled kernels and launch them on streams given by handle, without torch."""

from __future__ import annotations

import functools

from .nvrtc import compile_spec, cuda_core
from .spec import KernelSpec


def load(spec: KernelSpec, device: int) -> list[object]:
    """Return the kernels of `spec` in order of `spec.functions`, loaded into the primary context of
    a device, which becomes current.

    The kernels keep the driver's division of L1 cache and shared memory.
    """
    here = cuda_core().Device(device)
    here.set_current()
    code = compile_spec(spec, f"sm_{here.arch}")
    return [code.get_kernel(name) for name in spec.functions]


def launch_on(stream: int, kernel: object, grid: int, block: int, *args: object) -> None:
    """Launch on the stream with this handle; 0 is the default stream. args: numpy scalars, pointers
    as numpy.uintp.
    """
    config = launch_config((grid,), (block,), 0, False, None, False)
    cuda_core().launch(stream_of(stream), config, kernel, *args)


@functools.lru_cache(maxsize=1024)
def launch_config(
    grid: tuple, block: tuple, shared: int, pdl: bool, cluster: tuple | None, cooperative: bool
) -> object:
    """Return the configuration of a launch; `grid` counts blocks."""
    options = {}
    if cluster:
        cluster = cluster + (1,) * (len(grid) - len(cluster))
        # cuda.core counts clusters.
        grid = tuple(n // c for n, c in zip(grid, cluster, strict=True))
        options["cluster"] = cluster
    return cuda_core().LaunchConfig(
        grid=grid,
        block=block,
        shmem_size=shared,
        is_cooperative=cooperative,
        programmatic_stream_serialization=pdl,
        **options,
    )


@functools.lru_cache(maxsize=64)
def stream_of(handle: int) -> object:
    """Return the stream with this handle; 0 is the default stream."""
    core = cuda_core()
    return core.Stream.from_handle(handle) if handle else core.LEGACY_DEFAULT_STREAM

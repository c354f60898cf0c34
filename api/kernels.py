"""The CUDA kernels of all folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..formats.options import checks_keywords

if TYPE_CHECKING:
    from ..cuda_kernels.compile.nvrtc import KernelSpec


@checks_keywords
def kernel_specs() -> list[tuple[str, KernelSpec]]:
    """Return (module, spec) for every module of CUDA kernels that can be compiled ahead of time."""
    from ..cuda_kernels.registry import all_specs
    from ..quantize.cuda import trellis

    return list(all_specs({"quantize.trellis": trellis.specs}))

"""Specs of kernels, and the programs that they are compiled from.

A kernel is a spec: name, sources, constants. `nvrtc.py` compiles it.

    SPEC = KernelSpec(
        "dequantize_iq4_k",
        ("weights/dequantize.cu",),
        (("TYPE", "IQ4_K"),),
        ("dequantize_f32", "dequantize_bf16"),
    )

Rules for sources:
- They are files of `cuda_kernels/sources/`, named relative to it. `#include "units/k.cuh"` includes
  a file of that folder once; Python writes the GENERATED ones (tables and geometry from
  `formats/`). There are no headers in <>: sources declare what they need in inline PTX, and
  `units/common.cuh` has the usual types and conversions.
- Kernels are `extern "C"` and listed in `functions`.
- Every module with kernels declares them in a function `specs()` and is listed in `registry.py`, so
  that `iqforge kernels` and the test that compiles them for every architecture find them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import DeviceError

FOLDER = Path(__file__).resolve().parents[1] / "sources"


# Tests compile every kernel for these.
ARCHITECTURES = (
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_120",
)


_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)[^\n]*$', re.MULTILINE
)


_OPTIONS: tuple[tuple[str, object], ...] = (("std", "c++17"),)


def _geometry() -> str:
    from ..layouts.table import geometry_header

    return geometry_header()


def _tables() -> str:
    from .tables import tables_header

    return tables_header()


def _grids() -> str:
    from .grids import grids_header

    return grids_header()


def _trellis_constants() -> str:
    from .grids import trellis_header

    return trellis_header()


def _wgmma() -> str:
    from .wgmma import wgmma_header

    return wgmma_header()


def _wgmma_attention() -> str:
    from .wgmma import attention_header

    return attention_header()


# Headers that Python writes, by the name under which sources include them.
GENERATED: dict[str, Callable[[], str]] = {
    "units/geometry.cuh": _geometry,
    "units/tables.cuh": _tables,
    "units/grids.cuh": _grids,
    "units/trellis_constants.cuh": _trellis_constants,
    "prompt/wgmma.cuh": _wgmma,
    "prompt/wgmma_attention.cuh": _wgmma_attention,
}


@dataclass(frozen=True)
class KernelSpec:
    """One module of kernels. `defines`: macros, (name, value). `functions`: the kernels in it.
    `archs`: the only architectures it is for, e.g. ("sm_90a",) where it uses instructions of one
    generation; empty for all. `fma`: whether the compiler may fuse a multiplication and an addition
    into one rounding.
    """

    name: str
    sources: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]
    functions: tuple[str, ...]
    archs: tuple[str, ...] = ()
    fma: bool = True

    @property
    def options(self) -> tuple[tuple[str, object], ...]:
        """The options of the compiler besides the macros and the architecture."""
        return _OPTIONS if self.fma else (*_OPTIONS, ("fma", False))

    def target(self, arch: str) -> str | None:
        """Return the architecture to compile for on a device of `arch` ("sm_90": perhaps "sm_90a"),
        None if the spec is not for it.
        """
        if not self.archs:
            return arch
        return next((a for a in self.archs if a.rstrip("af") == arch.rstrip("af")), None)


@functools.cache
def _read(name: str) -> str:
    if name in GENERATED:
        return GENERATED[name]()
    return (FOLDER / name).read_text()


@functools.lru_cache(maxsize=64)
def expand(sources: tuple[str, ...]) -> str:
    """Return the program: the sources one after the other, with every header inserted where it is
    first included. Raise FileNotFoundError for a header that does not exist, and DeviceError for
    one in angle brackets.
    """
    seen: set[str] = set()

    def take(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = _read(name)
        parts, at = [f'#line 1 "{name}"\n'], 0
        for match in _INCLUDE.finditer(text):
            if match[2]:
                raise DeviceError(
                    f"cuda_kernels/sources/{name} includes <{match[2]}>: NVRTC is given no headers"
                )
            line = text.count("\n", 0, match.end()) + 2
            parts += [text[at : match.start()], take(match[1]), f'#line {line} "{name}"']
            at = match.end()
        return "".join(parts) + text[at:]

    return "\n".join(take(name) for name in sources)

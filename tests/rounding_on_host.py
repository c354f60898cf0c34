"""A device in numpy whose rounding kernels are compiled by g++ and run on the CPU."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path

import numpy as np
from iqforge.cuda_kernels.compile.spec import expand
from iqforge.cuda_kernels.rounding import From, specs

from .fake_device import FakeDevice, FakeEncoder
from .host_library import host_library

HEADER = Path(__file__).parent / "kernels_on_host.hpp"
_one_at_a_time = threading.Lock()  # blocks and fibers of the library are static
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^)]*)\)', re.S
)


def rounding_library(folder: Path) -> ctypes.CDLL:
    """Return a library with a function `run_KERNEL(grid, threads, ...)` for every kernel."""
    source = expand(tuple(name for spec in specs() for name in spec.sources))
    program = f'#include <cstdint>\n#include "{HEADER}"\n{source}\n'
    for name, parameters in _KERNEL.findall(source):
        given = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters.strip()))
        program += f"""extern "C" void run_{name}(int grid, int threads, {parameters}) {{
  launch_on_host(grid, 1, threads, [=] {{ {name}({given}); }});
}}
"""
    return host_library(folder / "rounding", program)


class HostDevice(FakeDevice):
    """Searches are the CPU's, rounding kernels are those of `library`."""

    def __init__(self, library: ctypes.CDLL):
        super().__init__()
        self.library, self.launched, self.number = library, 0, 0

    def wait(self, stream):
        pass

    def encoder(self, type, n_cols, weighted):
        return FakeEncoder(type, n_cols, weighted)

    def address(self, array):
        return array.ctypes.data

    def launch(self, kernel, grid, threads, stream, *arguments):
        self.launched += 1
        run = getattr(self.library, f"run_{kernel}")
        with _one_at_a_time:
            run(grid, threads, *map(_argument, arguments))


def _argument(value):
    if isinstance(value, From):
        value = value.array.reshape(-1)[value.elements :]
    if value is None or isinstance(value, np.ndarray):
        assert value is None or value.flags.c_contiguous
        return None if value is None else ctypes.c_void_p(value.ctypes.data)
    kinds = {np.int32: ctypes.c_int, np.int64: ctypes.c_longlong, np.float64: ctypes.c_double}
    return kinds[type(value)](value)

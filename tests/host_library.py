"""Kernels as a library for the CPU: what a test puts around the sources of `cuda_kernels/`,
compiled by g++.
"""

import ctypes
import subprocess
from pathlib import Path


def host_library(path: Path, program: str) -> ctypes.CDLL:
    """`program`, which includes one of the *_on_host.hpp of this folder and the expanded sources,
    compiled beside `path` (without suffix). CUDA's names of integers are left to <cstdint>, which
    has int64_t as long, and shared memory to the header.
    """
    lines = (
        line
        for line in program.splitlines()
        if not (line.startswith("typedef") and line.endswith("_t;"))
        and not line.startswith("extern __shared__")
    )
    source, library = path.with_suffix(".cpp"), path.with_suffix(".so")
    source.write_text("\n".join(lines))
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            library,
            source,
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))

"""Compile kernels with g++ as a library for the CPU."""

import ctypes
import os
import subprocess
from pathlib import Path

CHECKS = {
    "alignment": ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    "races": ("-fsanitize=thread", "-g"),
}


def host_library(path: Path, program: str) -> ctypes.CDLL:
    """Compile `program`, which includes one of the *_on_host.hpp of this folder and the expanded
    sources, next to `path` (without suffix). <cstdint> defines the integer types, with int64_t as
    long, and the header defines shared memory. A load or store at an address that a GPU would
    refuse, as it is no multiple of the size, ends the process.
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
            *CHECKS[os.environ.get("IQFORGE_HOST_CHECKS", "alignment")],
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

"""Compile kernels with g++ as a library for the CPU."""

import ctypes
import functools
import os
import subprocess
import tempfile
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
    library = path.with_suffix(".so")
    checks = CHECKS[os.environ.get("IQFORGE_HOST_CHECKS", "alignment")]
    library.unlink(missing_ok=True)  # one that is loaded keeps its own file
    library.write_bytes(compiled("\n".join(lines), checks))
    return ctypes.CDLL(str(library))


@functools.cache
def compiled(source: str, checks: tuple[str, ...]) -> bytes:
    """Return the library as a file, so that each caller loads a copy with variables of its own."""
    with tempfile.TemporaryDirectory() as folder:
        program, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        program.write_text(source)
        subprocess.run(
            [
                "g++",
                "-std=c++17",
                "-O1",
                *checks,
                "-ffp-contract=off",
                "-shared",
                "-fPIC",
                "-w",
                "-o",
                library,
                program,
            ],
            check=True,
        )
        return library.read_bytes()

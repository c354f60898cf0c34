"""Compile kernels with g++ as a library for the CPU."""

import atexit
import ctypes
import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

CHECKS = {
    "alignment": ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    "races": ("-fsanitize=thread", "-g"),
}


FLAGS = ("-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-w")
FIRST_HEADER = re.compile(r'\A\s*#include "(.*)"')


def host_library(path: Path, program: str) -> ctypes.CDLL:
    """Compile `program` next to `path` (without suffix). It includes one of the *_on_host.hpp of
    this folder first, and then the expanded sources. <cstdint> defines the integer types, with
    int64_t as long, and the header defines shared memory. A load or store at an address that a GPU
    would refuse, as it is no multiple of the size, ends the process.
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
        program.write_text(
            FIRST_HEADER.sub(lambda found: f'#include "{parsed(found[1], checks)}"', source)
        )
        subprocess.run(
            ["g++", *FLAGS, *checks, "-shared", "-o", library, program],
            check=True,
        )
        return library.read_bytes()


@functools.cache
def parsed(header: str, checks: tuple[str, ...]) -> Path:
    """Return a header that includes this one, in a folder that lasts as long as the process. g++
    finds it parsed there, which saves it up to half of its time. It takes only the first header of
    a program so.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "parsed.hpp"
    path.write_text(f'#include "{header}"\n')
    subprocess.run(
        ["g++", *FLAGS, *checks, "-x", "c++-header", "-o", f"{path}.gch", path],
        check=True,
    )
    return path

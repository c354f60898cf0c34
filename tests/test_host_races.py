"""Data races within a block, in all kernels that tests compile for the CPU: those tests again,
under g++'s thread sanitizer (see `fibers_on_host.hpp`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# In the file that is left out, ranks look at memory of others until it changes, which a sanitizer
# takes for races.
FILES = sorted(
    {path.name for path in FOLDER.glob("test_*_on_host.py")} - {"test_peer_rows_on_host.py"}
    | {"test_index.py"}
)
RACY = """
#include "{header}"
extern "C" void run(int* out) {{
    launch_on_host(1, 1, 64, [&] {{
        int* slots = (int*)shared;
        slots[threadIdx.x] = threadIdx.x;
        {barrier}
        out[threadIdx.x] = slots[63 - threadIdx.x];
    }});
}}
"""
CALL = """
import ctypes, sys
from pathlib import Path
from tests.host_library import host_library
library = host_library(Path(sys.argv[1]), Path(sys.argv[2]).read_text())
out = (ctypes.c_int * 64)()
library.run(out)
assert sum(out) in range(64 * 64)
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the variables of a process whose kernels are checked."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    asked = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True)
    library = asked.stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("g++ has no thread sanitizer here")
    here = os.environ | {"LD_PRELOAD": library, "IQFORGE_HOST_CHECKS": "races"}
    done = subprocess.run(["true"], env=here, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the thread sanitizer does not run here: {done.stderr.splitlines()[:1]}")
    here.pop("IQFORGE_TEST_FULL", None)  # which would take hours
    return here | {"OMP_NUM_THREADS": "1"}


def reports(command: list, environment: dict[str, str], folder: Path) -> str:
    """Return what the sanitizer says of a process, which must end well."""
    log = folder / "races"
    options = f"ignore_noninstrumented_modules=1 log_path={log} exitcode=0"
    done = subprocess.run(
        command,
        env=environment | {"TSAN_OPTIONS": options},
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return "".join(path.read_text() for path in folder.glob("races.*"))


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
def test_kernels_have_no_races(file, environment, tmp_path):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", f"tests/{file}"]
    assert reports(command, environment, tmp_path) == ""


@pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
def test_a_missing_barrier_is_found(barrier, environment, tmp_path):
    source = tmp_path / "racy.txt"
    source.write_text(RACY.format(header=FOLDER / "kernels_on_host.hpp", barrier=barrier))
    command = [sys.executable, "-c", CALL, str(tmp_path / "racy"), str(source)]
    assert ("data race" in reports(command, environment, tmp_path)) == (not barrier)

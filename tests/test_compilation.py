"""Compiling ahead: which code is missing, which processes compile it, and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import iqforge
import numpy as np
import pytest
from iqforge.cli import main
from iqforge.errors import UnsupportedTypeError
from iqforge.formats.codecs.codec import decode
from iqforge.formats.codecs.scalars import nearest_half
from iqforge.formats.kernel import rehearse
from iqforge.formats.types import ggml_type
from iqforge.quantize.report.bars import compile_line
from iqforge.quantize.run.compilation import compile_ahead, missing_tasks
from iqforge.quantize.run.compile_task import CompileProgress, CompileTask

PACKAGES = str(Path(iqforge.__file__).parent.parent)


def run_in_new_cache(code: str, cache: Path) -> dict:
    """Run `code` in a new process that has compiled nothing yet; return the JSON that it prints."""
    paths = [PACKAGES, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


AHEAD = """
import json
from iqforge.formats.kernel import rehearse
from iqforge.quantize.run import compilation
from iqforge.quantize.run.compile_task import CompileProgress, CompileTask
said = []
class Listener(CompileProgress):
    def compiling(self, tasks, seconds): said.append([str(task) for task in tasks])
    def compiled(self, task): said.append(task.type)
    def compile_end(self): said.append("end")
compilation._WORTH_PROCESSES = 0
tasks = [CompileTask("search", "Q8_0"), CompileTask("decode", "MXFP4")]
before = len(compilation.missing_tasks(tasks))
done = compilation.compile_ahead(tasks, Listener(), JOBS)
here = sum(len(c.loop._dispatcher.overloads) for t in tasks
           for c in rehearse(t.work))
print(json.dumps([before, len(done), said, len(compilation.missing_tasks(tasks)), here]))
"""


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_missing_code_is_compiled_once(tmp_path, processes):
    code = AHEAD.replace("JOBS", str(processes))
    before, done, said, after, here = run_in_new_cache(code, tmp_path)
    assert (before, done, after) == (2, 2, 0)
    assert said[0] == ["the search for Q8_0", "the decoder of MXFP4"] and said[-1] == "end"
    assert sorted(said[1:-1]) == ["MXFP4", "Q8_0"]
    assert here == (2 if processes == 1 else 0), (
        "processes fill the cache, nothing is compiled here"
    )
    before, done, said, after, here = run_in_new_cache(code, tmp_path)
    assert (before, done, said, after) == (0, 0, [], 0), "the cache on disk is asked"


def test_a_process_that_ends_is_replaced(tmp_path):
    code = AHEAD.replace("JOBS", "2").replace(
        "before =", "compilation._Worker.compile = lambda self, task: False\nbefore ="
    )
    _, done, said, after, here = run_in_new_cache(code, tmp_path)
    assert (done, after, here) == (2, 0, 2) and len(said) == 4


def test_a_rehearsal_runs_and_compiles_nothing():
    x = np.ones((4, 256), dtype=np.float32)
    codes = rehearse(lambda: iqforge.encode("Q8_0", x))
    assert len(codes) == 1 and codes == rehearse(lambda: iqforge.encode("Q8_0", x))
    weighted = rehearse(lambda: iqforge.encode("Q8_0", x, np.ones(256)))
    assert len(weighted) == 1 and weighted != codes, "without importances the definition is used"
    one, many = (rehearse(lambda n=n: iqforge.encode("IQ4_KS", x[:n])) for n in (1, 4))
    assert one == many, "one row needs the code of many"
    assert iqforge.encode("Q8_0", x).any()


def test_internal_functions_refuse_calls_from_python():
    with pytest.raises(TypeError, match="compiled functions"):
        nearest_half(np.float32(1))  # it has no entry point: without the check Python would crash


def test_types_share_compiled_functions():
    from iqforge.quantize.search import iq_k, iq_ks

    four, five = iq_k._iq4_k.names.values(), iq_k._iq5_k.names.values()
    shared = set(map(id, four)) & set(map(id, five))
    assert shared and len(shared) < len(list(four))
    assert not set(map(id, iq_k._iq4_k.names.values())) <= set(
        map(id, iq_ks._iq4_ks.names.values())
    )


def test_tasks():
    task = CompileTask("search", "IQ4_KT")
    assert str(task) == "the search for IQ4_KT" and task.seconds > 2
    assert not missing_tasks([]) and not compile_ahead([], CompileProgress())
    with pytest.raises(UnsupportedTypeError, match="no quantizer for I2_S"):
        iqforge.warm_up(["I2_S"])


def test_the_command(capsys):
    assert main(["warmup", "-j", "1", "Q8_0"]) == 0
    assert capsys.readouterr().out.startswith("1 type ready: ")
    assert main(["warmup", "-j", "-1"]) == 1 and "--jobs is -1" in capsys.readouterr().err


def test_lines():
    tasks = [CompileTask("search", "IQ4_KT"), CompileTask("decode", "IQ4_KT", as_weights=True)]
    assert compile_line(tasks, 19.6) == "compiling the search for IQ4_KT (once, about 20 s)"
    tasks.append(CompileTask("search", "Q6_K", True))
    assert compile_line(tasks, 75) == (
        "compiling the 2 searches for IQ4_KT, Q6_K (once, about 1.2 min)"
    )
    assert compile_line(tasks[1:2], 0.1) == "compiling the decoder of IQ4_KT (once, about 1 s)"
    rounding = [CompileTask("decode", "Q4_0"), CompileTask("round", "Q4_0")]
    assert compile_line(rounding, 3) == "compiling the rounding to Q4_0 (once, about 3 s)"


@pytest.mark.parametrize("name", ["IQ4_K", "IQ4_KS"])
def test_a_decoder_is_compiled_once_for_all_rows(name):
    """One of bytes that can be written, as just made, or not, as in a file; of one row or more; and
    with a row header or without one.
    """
    size = ggml_type(name).row_bytes(256)

    def work():
        for rows in (1, 2):
            for writeable in (True, False):
                data = np.zeros((rows, size), dtype=np.uint8)
                data.flags.writeable = writeable
                decode(name, data, 256)

    assert len(rehearse(work)) == 1

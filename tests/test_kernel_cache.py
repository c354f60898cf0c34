"""Compiling kernels and caching them. cuda-core is needed, a device is not."""

import importlib.util
import multiprocessing
import os

import pytest
from iqforge.cuda_kernels.compile import nvrtc as compiling
from iqforge.cuda_kernels.compile import spec as spec_module
from iqforge.cuda_kernels.compile.nvrtc import cache_file, compile_spec, is_cached
from iqforge.cuda_kernels.compile.spec import KernelSpec, expand
from iqforge.errors import DeviceError, UnsupportedTypeError

needs_cuda_core = pytest.mark.skipif(
    not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")),
    reason="cuda-core is not installed",
)
SOURCE = """\
#include "parts/common.cuh"
#include "parts/more.cuh"
extern "C" __global__ void fill(int* out) { out[threadIdx.x] = more(NUMBER); }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of sources, with an empty cache."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "fill.cu").write_text(SOURCE)
    (tmp_path / "parts/common.cuh").write_text("typedef unsigned int number;\n")
    (tmp_path / "parts/more.cuh").write_text(
        '#include "parts/common.cuh"\n__device__ number more(number n) { return n + 1; }\n'
    )
    monkeypatch.setattr(spec_module, "FOLDER", tmp_path)
    monkeypatch.setenv("IQFORGE_CACHE_DIR", str(tmp_path / "cache"))
    _forget()
    yield tmp_path
    _forget()


def _forget():
    spec_module._read.cache_clear()
    expand.cache_clear()


def spec(number="7", **options):
    return KernelSpec("fill", ("fill.cu",), (("NUMBER", number),), ("fill",), **options)


def test_headers_are_put_in_once_and_lines_keep_their_numbers(folder):
    text = expand(("fill.cu",))
    assert text.count("typedef unsigned int number") == 1
    assert text.index("typedef") < text.index("number more") < text.index("void fill")
    assert '#line 3 "fill.cu"' in text


@needs_cuda_core
def test_compiled_code_is_kept_until_something_changes(folder):
    path = cache_file(spec(), "sm_90")
    assert not is_cached(spec(), "sm_90")
    code = compile_spec(spec(), "sm_90").code
    assert is_cached(spec(), "sm_90") and path.read_bytes() == code
    stamp = path.stat().st_mtime_ns
    compile_spec(spec(), "sm_90")
    assert path.stat().st_mtime_ns == stamp
    assert not is_cached(spec("8"), "sm_90") and not is_cached(spec(), "sm_80")
    path.write_bytes(b"something else")
    assert compile_spec(spec(), "sm_90").code == code
    (folder / "parts/common.cuh").write_text("typedef int number;\n")
    _forget()
    assert not is_cached(spec(), "sm_90")


@needs_cuda_core
def test_errors_are_named(folder):
    with pytest.raises(DeviceError, match="NUMBR|undefined"):
        compile_spec(KernelSpec("fill", ("fill.cu",), (), ("fill",)), "sm_90")
    with pytest.raises(DeviceError, match="lack drain"):
        compile_spec(
            KernelSpec("fill", ("fill.cu",), (("NUMBER", "1"),), ("fill", "drain")), "sm_90"
        )
    with pytest.raises(UnsupportedTypeError, match="sm_90a, not for sm_80"):
        compile_spec(spec(archs=("sm_90a",)), "sm_80")
    assert cache_file(spec(archs=("sm_90a",)), "sm_90").name.startswith("fill-sm_90a-")
    (folder / "fill.cu").write_text("#include <cuda_fp16.h>\n")
    _forget()
    with pytest.raises(DeviceError, match="cuda_fp16.h"):
        compile_spec(spec(), "sm_90")


def _compile_and_count(number):
    original, count = compiling._compiled, []
    compiling._compiled = lambda *args: count.append(1) or original(*args)
    compile_spec(spec(number), "sm_90")
    return len(count)


@needs_cuda_core
def test_processes_wait_for_each_other(folder):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert sum(pool.map(_compile_and_count, ["9"] * 8, chunksize=1)) == 1
    assert (
        len([name for name in os.listdir(folder / "cache/kernels") if name.endswith(".cubin")]) == 1
    )
    assert not [name for name in os.listdir(folder / "cache/kernels") if name.endswith(".part")]

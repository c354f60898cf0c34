"""Every kernel compiles for every architecture, and `iqforge kernels`."""

import importlib.util
import os

import pytest

from iqforge.cli import main
from iqforge.cuda_kernels import step_attention
from iqforge.cuda_kernels.compile import ARCHITECTURES, FOLDER, expand
from iqforge.cuda_kernels.registry import all_specs, build, missing

SPECS = [spec for _, spec in all_specs()]
needs_cuda_core = pytest.mark.skipif(not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")),
                                     reason="cuda-core is not installed")


@needs_cuda_core
def test_every_kernel_compiles_for_every_architecture():
    """Into the user's cache, so that a second run has nothing to do."""
    wanted = missing(SPECS, ARCHITECTURES)
    for _ in build(wanted, os.cpu_count() or 1):
        pass
    assert not missing(SPECS, ARCHITECTURES)
    assert all(any(spec.target(arch) for arch in ARCHITECTURES) for spec in SPECS)


def test_kernels_with_units_bring_their_tables():
    """Codebook types look entries up in shared memory, where every kernel has to put them before it unpacks the first unit."""
    sources = {spec.sources[-1] for spec in SPECS if any(name.startswith("units/") for name in spec.sources)}
    assert {"dequantize.cu", "matvec.cu", "experts.cu", "prompt_grouped.cu"} <= sources
    for name in sources:
        kernels = (FOLDER / name).read_text()
        assert "prepare_unit<TYPE>();" in kernels, name


@needs_cuda_core
def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IQFORGE_CACHE_DIR", str(tmp_path))
    assert main(["kernels", "--arch", "sm_90,sm_120", "rearr*"]) == 0
    assert "0 of 2 modules are compiled" in capsys.readouterr().out
    assert main(["kernels", "--build", "--arch", "sm_90", "rearrange", "-j", "1"]) == 0
    out = capsys.readouterr().out
    assert "compiled 1 modules" in out and "1 of 1 modules are compiled" in out
    assert main(["kernels", "--clear"]) == 0
    assert "removed 1 compiled modules" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.cubin"))


def test_wrong_usage(capsys):
    for arguments, message in ((["nothing"], "no kernel is named 'nothing'"), (["--arch", "90"], "spelled as sm_90"),
                               (["--clear", "--build"], "removes everything"), (["-j", "0"], "above 0")):
        assert main(["kernels", *arguments]) == 1
        assert message in capsys.readouterr().err


@needs_cuda_core
@pytest.mark.parametrize("spec", step_attention.specs()[:2], ids=lambda spec: spec.name)
def test_attention_reads_projections_as_memory_that_changes(spec):
    """The launch in front of it writes them while it may already run: the read-only path is not made for that."""
    from cuda.bindings import nvrtc  # cuda.core asks the driver before it gives PTX

    def good(answer):
        assert int(answer[0]) == 0
        return answer[1:]

    options = ["--gpu-architecture=compute_90", "--std=c++17", *(f"-D{name}={value}" for name, value in spec.defines)]
    (program,) = good(nvrtc.nvrtcCreateProgram(expand(spec.sources).encode(), b"attention.cu", 0, [], []))
    good(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * good(nvrtc.nvrtcGetPTXSize(program))[0]
    good(nvrtc.nvrtcGetPTX(program, text))
    good(nvrtc.nvrtcDestroyProgram(program))
    ptx = text.decode()
    before, after = ptx.split("griddepcontrol.wait;")
    assert before.count("ld.global.nc") == 1  # the position, which an earlier step has written
    assert "ld.global.nc" not in after and "ld.global.cg" in after

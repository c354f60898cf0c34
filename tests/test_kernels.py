"""Every kernel compiles for every architecture, and `iqforge kernels`."""

import importlib.util
import os

import pytest

from iqforge.cli import main
from iqforge.cuda_kernels.compile import ARCHITECTURES
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

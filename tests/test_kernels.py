"""Every kernel compiles; `iqforge kernels`."""

import importlib.util
import os

import pytest
from iqforge.api.kernels import kernel_specs
from iqforge.cli import main
from iqforge.cuda_kernels.attention import step as step_attention
from iqforge.cuda_kernels.compile import nvrtc as compiling
from iqforge.cuda_kernels.compile import spec as spec_module
from iqforge.cuda_kernels.compile.spec import ARCHITECTURES, FOLDER, KernelSpec, expand
from iqforge.cuda_kernels.registry import MODULES, build, missing, unchecked
from iqforge.errors import DeviceError

SPECS = [spec for _, spec in kernel_specs()]
needs_cuda_core = pytest.mark.skipif(
    not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.core")),
    reason="cuda-core is not installed",
)


def test_every_module_with_specs_is_listed():
    folder = FOLDER.parent
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\ndef specs(" in path.read_text()
    }
    assert found == set(MODULES)
    assert {"search_iq1_kt", "search_iq4_kt"} <= {spec.name for spec in SPECS}


SOURCES = sorted({spec.sources[-1] for spec in SPECS})
ONE = "sm_90"  # every kernel is for it


def compile_kernels(specs: list[KernelSpec], archs: tuple[str, ...], full: bool = False) -> None:
    """Compile kernels into the user's cache, or check with little optimization that they compile.
    The cache remembers both, so that a second run has nothing to do.
    """
    wanted = missing(specs, archs) if full else unchecked(specs, archs)
    for _ in build(wanted, 1, check=not full):
        pass
    assert not (missing(specs, archs) if full else unchecked(specs, archs))


LONG = {"prompt/grouped.cu", "prompt/rounded.cu"}  # for all types


@needs_cuda_core
@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(LONG))
def test_a_sample_of_long_kernels_compiles(source):
    specs = [spec for spec in SPECS if spec.sources[-1] == source]
    compile_kernels(list({spec.archs: spec for spec in specs}.values()), (ONE,), full=True)


def parts_of(spec: KernelSpec) -> set[object]:
    """What makes a kernel another one than those of the same source."""
    return {spec.archs, *spec.sources, *spec.defines, *spec.functions, *spec.options}


def each_part_once(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Return few specs that have every part of all of them."""
    chosen, left = [], set().union(*map(parts_of, specs))
    while left:
        chosen.append(max(specs, key=lambda spec: len(parts_of(spec) & left)))
        left -= parts_of(chosen[-1])
    return chosen


@needs_cuda_core
@pytest.mark.slow
@pytest.mark.parametrize("source", [source for source in SOURCES if source not in LONG])
def test_every_part_of_kernels_compiles(source):
    """Every header, type and value of a macro compiles with little optimization for one
    architecture, in as few kernels as have them. The next test takes all that are combined.
    """
    specs = [spec for spec in SPECS if spec.sources[-1] == source]
    assert all(spec.target(ONE) for spec in specs)
    compile_kernels(each_part_once(specs), (ONE,))


def test_a_sample_has_every_part():
    specs = [
        KernelSpec(f"{type}-{cols}", ("a.cu",), (("TYPE", type), ("COLS", cols)), ("f",))
        for type in ("Q4_0", "Q8_0", "IQ4_K")
        for cols in ("1", "2")
    ]
    sample = each_part_once(specs)
    assert {d for spec in sample for d in spec.defines} == {d for s in specs for d in s.defines}
    assert len(sample) == 3


@needs_cuda_core
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles(source):
    """All kernels of a source compile for one architecture with little optimization. The next test
    takes all architectures.
    """
    compile_kernels([spec for spec in SPECS if spec.sources[-1] == source], (ONE,))


@needs_cuda_core
@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_for_every_architecture(source, arch, request):
    """With IQFORGE_TEST_KERNELS=full everything is fully optimized."""
    chosen = os.environ.get("IQFORGE_TEST_KERNELS")
    if chosen not in ("all", "full") and request.config.option.markexpr != "slow":
        pytest.skip("other architectures: -m slow, or IQFORGE_TEST_KERNELS=all or full")
    specs = [spec for spec in SPECS if spec.sources[-1] == source]
    compile_kernels(specs, (arch,), full=chosen == "full")


def test_kernels_with_units_bring_their_tables():
    """Codebook types look up entries in shared memory, where every kernel has to store them before
    it unpacks the first unit.
    """
    sources = {
        spec.sources[-1]
        for spec in SPECS
        if any(name.startswith("units/") for name in spec.sources)
    }
    assert {
        "weights/dequantize.cu",
        "matvec/matvec.cu",
        "matvec/experts.cu",
        "prompt/grouped.cu",
    } <= sources
    sources.remove("matvec/experts.cu")  # it includes one of two
    for name in {*sources, "matvec/expert_gates.cuh", "matvec/expert_down.cuh"}:
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
    assert main(["kernels", "--check", "--arch", "sm_120", "rearrange", "-j", "1"]) == 0
    out = capsys.readouterr().out
    assert (
        "checked 1 modules" in out
        and "0 of 1 modules are compiled" in out
        and list(tmp_path.rglob("*.checked"))
    )
    assert main(["kernels", "--check", "--arch", "sm_90,sm_120", "rearrange"]) == 0
    assert "checked 0 modules" in capsys.readouterr().out
    # Cached kernels can be listed and removed where nothing can be compiled.
    monkeypatch.setattr(compiling, "_has_cuda_core", lambda: False)
    assert main(["kernels", "--arch", "sm_90", "rearrange"]) == 0
    assert "1 of 1 modules are compiled" in capsys.readouterr().out
    for flag in ("--build", "--check"):
        assert main(["kernels", flag, "--arch", "sm_90", "rearrange"]) == 1
        assert "need the package cuda-core: pip install 'iqforge[cuda]'" in capsys.readouterr().err
    assert main(["kernels", "--clear"]) == 0
    assert "removed 1 compiled modules" in capsys.readouterr().out
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_listing_needs_no_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IQFORGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_has_cuda_core", lambda: False)
    assert main(["kernels", "--arch", "all"]) == 0
    out = capsys.readouterr().out
    assert (
        f"0 of {sum(spec.target(arch) is not None for spec in SPECS for arch in ARCHITECTURES)}"
        " modules are compiled" in out
    )
    assert all(spec.name in out for spec in SPECS)


@needs_cuda_core
def test_code_that_does_not_compile_is_found_quickly(tmp_path, monkeypatch):
    """The check also finds what only the assembler refuses: an instruction that an architecture
    does not have.
    """
    monkeypatch.setenv("IQFORGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(spec_module, "FOLDER", tmp_path)
    for name, text in (
        ("typo.cu", "flaot x = 1;"),
        ("newer.cu", 'asm volatile("griddepcontrol.wait;" ::: "memory");'),
    ):
        (tmp_path / name).write_text(f'extern "C" __global__ void f() {{ {text} }}\n')
        spec = KernelSpec(name, (name,), (), ("f",))
        with pytest.raises(DeviceError, match="do not compile for sm_80"):
            compiling.check_spec(spec, "sm_80")
        assert unchecked([spec], ["sm_80"])
    compiling.check_spec(spec, "sm_90")
    assert not unchecked([spec], ["sm_90"]) and missing([spec], ["sm_90"])


def test_wrong_usage(capsys):
    for arguments, message in (
        (["nothing"], "no kernel is named 'nothing'"),
        (["--arch", "90"], "spelled as sm_90"),
        (["--clear", "--build"], "exclude one another"),
        (["--check", "--build"], "exclude one another"),
        (["-j", "0"], "above 0"),
    ):
        assert main(["kernels", *arguments]) == 1
        assert message in capsys.readouterr().err


@needs_cuda_core
@pytest.mark.parametrize("spec", step_attention.specs()[:2], ids=lambda spec: spec.name)
def test_attention_reads_projections_as_memory_that_changes(spec):
    """The previous launch may still write them while attention runs, and the read-only path does
    not allow that.
    """
    from cuda.bindings import nvrtc  # cuda.core asks the driver before it gives PTX

    def good(answer):
        assert int(answer[0]) == 0
        return answer[1:]

    options = [
        "--gpu-architecture=compute_90",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in spec.defines),
    ]
    (program,) = good(
        nvrtc.nvrtcCreateProgram(
            expand(spec.sources).encode(), b"attention/attention.cu", 0, [], []
        )
    )
    good(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * good(nvrtc.nvrtcGetPTXSize(program))[0]
    good(nvrtc.nvrtcGetPTX(program, text))
    good(nvrtc.nvrtcDestroyProgram(program))
    ptx = text.decode()
    before, after = ptx.split("griddepcontrol.wait;")
    assert before.count("ld.global.nc") == 1  # the position, which an earlier step has written
    assert "ld.global.nc" not in after and "ld.global.cg" in after

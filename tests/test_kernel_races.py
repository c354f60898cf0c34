"""Data races within a block, in kernels of the decode step and of a prompt's experts.

The kernels run on the CPU, one fiber per thread, under g++'s thread sanitizer (fibers_on_host.hpp).
Barriers order accesses to memory and nothing else: values that lanes exchange in registers do not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from iqforge.cuda_kernels.attention.shape import AttentionShape
from iqforge.cuda_kernels.common.delta_heads import DeltaHeads
from iqforge.cuda_kernels.common.routing import Routing
from iqforge.cuda_kernels.compile.spec import KernelSpec, expand
from iqforge.cuda_kernels.prompt import delta as prompt_delta
from iqforge.cuda_kernels.prompt import kimi_delta as prompt_kimi_delta
from iqforge.cuda_kernels.prompt import state_space as prompt_state_space
from iqforge.cuda_kernels.prompt.experts import _EXPERTS_SPEC
from iqforge.cuda_kernels.step import delta as step_delta
from iqforge.cuda_kernels.step.delta import DeltaShape
from iqforge.cuda_kernels.step.kimi_delta import KimiDeltaShape, kimi_delta_spec
from iqforge.cuda_kernels.step.router import router_spec
from iqforge.cuda_kernels.step.sample import SAMPLE
from iqforge.cuda_kernels.step.state_space import StateSpaceShape, state_space_spec

from .kernels_on_host import (
    HEADER,
    LIMIT,
    MMA,
    RUN_ATTENTION,
    RUN_DELTA,
    RUN_EXPERTS,
    RUN_KIMI_DELTA,
    RUN_PROMPT_DELTA,
    RUN_PROMPT_KIMI_DELTA,
    RUN_PROMPT_STATE_SPACE,
    RUN_ROUTER,
    RUN_SAMPLE,
    RUN_STATE_SPACE,
)
from .race_programs import (
    MAIN_ATTENTION,
    MAIN_DELTA,
    MAIN_EXPERTS,
    MAIN_KIMI_DELTA,
    MAIN_PROMPT_DELTA,
    MAIN_PROMPT_KIMI_DELTA,
    MAIN_PROMPT_STATE_SPACE,
    MAIN_ROUTER,
    MAIN_SAMPLE,
    MAIN_STATE_SPACE,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]

BUILD = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-w", "-o"]


@pytest.fixture(scope="module", autouse=True)
def sanitizer(tmp_path_factory):
    """Skip the tests where g++ has no thread sanitizer, or it does not run."""
    folder = tmp_path_factory.mktemp("sanitizer")
    (folder / "empty.cpp").write_text("int main() {}")
    if subprocess.run([*BUILD, folder / "empty", folder / "empty.cpp"]).returncode:
        pytest.skip("g++ has no thread sanitizer here")
    done = subprocess.run([folder / "empty"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the thread sanitizer does not run here: {done.stderr.splitlines()[:1]}")


def races(folder, spec: KernelSpec, run: str, main: str, change=lambda source: source) -> str:
    """Return the sanitizer's report of a run; it is empty without races."""
    defines = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    source = change(expand(spec.sources))
    if run is RUN_ATTENTION:
        source = source.replace("struct Mixer {", MMA + "struct Mixer {")
    (folder / "kernel.cpp").write_text(f'#include "{HEADER}"\n{defines}{source}{run}{main}')
    subprocess.run([*BUILD, folder / "kernel", folder / "kernel.cpp"], check=True)
    done = subprocess.run(
        [folder / "kernel"],
        capture_output=True,
        text=True,
        env={"TSAN_OPTIONS": "exitcode=66 report_bugs=1"},
    )
    assert done.returncode in (0, 66), done.stderr[-2000:]
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(1, 8, 1, 64, 64, "F16", "F16", 64, True, True),
        pytest.param(
            AttentionShape(3, 2, 1, 64, 64, "Q8_0", "Q5_1", 64, False, False, 64, 64),
            marks=pytest.mark.full,
        ),
    ],
    ids=["tensor cores", "encoded"],
)
def test_attention(shape, tmp_path):
    assert not races(tmp_path, shape.spec(LIMIT), RUN_ATTENTION, MAIN_ATTENTION)


@pytest.mark.parametrize(
    "width, n_experts", [(512, 6), pytest.param(4, 256, marks=pytest.mark.full)]
)
def test_router(width, n_experts, tmp_path):
    spec = router_spec(2, width, n_experts, 2, None, Routing(shared=1, shared_gate=True))
    assert not races(tmp_path, spec, RUN_ROUTER, MAIN_ROUTER)


def test_draws(tmp_path):
    assert not races(tmp_path, SAMPLE, RUN_SAMPLE, MAIN_SAMPLE)


def test_experts_of_a_prompt(tmp_path):
    # The header for the CPU has one already.
    spec = replace(_EXPERTS_SPEC, defines=(("warp_sum", "prompt_warp_sum"),))
    assert not races(tmp_path, spec, RUN_EXPERTS, MAIN_EXPERTS)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_delta_net(rows, tmp_path):
    shape = DeltaShape(rows, 64, DeltaHeads(1, 2, 16, 16, 4, True, False))
    assert not races(tmp_path, step_delta.delta_spec(shape), RUN_DELTA, MAIN_DELTA)


def test_kimi_delta(tmp_path):
    spec = kimi_delta_spec(KimiDeltaShape(3, 2, 20, 4))
    assert not races(tmp_path, spec, RUN_KIMI_DELTA, MAIN_KIMI_DELTA)


def test_a_state_space(tmp_path):
    spec = state_space_spec(StateSpaceShape(3, 4, 2, 16, 20, 4))
    assert not races(tmp_path, spec, RUN_STATE_SPACE, MAIN_STATE_SPACE)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_state_spaces_of_a_prompt(stages, tmp_path):
    shape = StateSpaceShape(1, 2, 1, 12, 72, 3)
    spec = prompt_state_space.state_space_spec(shape, torch.bfloat16, stages)
    assert not races(tmp_path, spec, RUN_PROMPT_STATE_SPACE, MAIN_PROMPT_STATE_SPACE)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_delta_nets_of_a_prompt(stages, tmp_path):
    heads = DeltaHeads(1, 2, 20, 12, 3, False, False)
    spec = prompt_delta.delta_spec(heads, torch.bfloat16, stages)
    assert not races(tmp_path, spec, RUN_PROMPT_DELTA, MAIN_PROMPT_DELTA)


def test_kimi_delta_of_a_prompt(tmp_path):
    spec = prompt_kimi_delta.kimi_delta_spec(
        DeltaHeads(2, 2, 20, 20, 3, True, False), torch.bfloat16, 2
    )
    assert not races(tmp_path, spec, RUN_PROMPT_KIMI_DELTA, MAIN_PROMPT_KIMI_DELTA)


BARRIERS = {
    "of a block": (
        "    __syncthreads();\n    STAMP(INPUT_READY);\n",
        lambda: (router_spec(2, 512, 6, 2), RUN_ROUTER, MAIN_ROUTER),
    ),
    "of a warp": (
        "            __syncwarp();  // all lanes have read the maximum so far\n",
        lambda: (
            AttentionShape(1, 2, 1, 64, 64, "F16", "F16", 64, True, True, by_warp=False).spec(
                LIMIT
            ),
            RUN_ATTENTION,
            MAIN_ATTENTION,
        ),
    ),
}


@pytest.mark.parametrize("which", BARRIERS)
def test_a_barrier_that_is_missing_is_found(which, tmp_path):
    barrier, case = BARRIERS[which]

    def without(source: str) -> str:
        assert source.count(barrier) == 1
        rest = re.sub(r" *__sync(threads|warp)\(\);.*\n", "", barrier)
        return source.replace(barrier, rest)

    assert "data race" in races(tmp_path, *case(), without)

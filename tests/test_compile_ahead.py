"""What a model needs of compiled code on the CPU is compiled together, in several processes."""

from __future__ import annotations

import os
import sys
from functools import partial

import pytest
from iqforge.runtime.bench.synthetic import SyntheticSource
from iqforge.runtime.cpu import path
from iqforge.runtime.model import Model
from iqforge.runtime.network.sampling import Sampling
from iqforge.runtime.simd import compiling, operations


def note(folder, number: int) -> None:
    (folder / f"{number} {os.getpid()}").touch()


@pytest.mark.parametrize("processors", [1, 3])
def test_every_task_is_done_once(tmp_path, monkeypatch, processors):
    monkeypatch.setattr(compiling, "_processors", lambda: processors)
    compiling.in_processes([partial(note, tmp_path, i) for i in range(300)])
    found = [name.split() for name in os.listdir(tmp_path)]
    assert sorted(int(number) for number, _ in found) == list(range(300))
    forks = processors > 1 and sys.platform == "linux"
    assert forks or {process for _, process in found} == {str(os.getpid())}


def test_processes_that_do_not_end_are_ended(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("processes are forks on Linux only")
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    child = os.fork()
    if child == 0:
        while True:
            pass
    compiling._wait_for([child])
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        ("llama-tiny:IQ4_K", 24),
        ("llama-tiny:IQ4_K", 3),
        pytest.param("qwen3moe-tiny:Q8_0", 24, marks=pytest.mark.slow),
        pytest.param("qwen35-tiny:Q8_0", 24, marks=pytest.mark.slow),
    ],
)
def test_a_model_asks_for_what_it_needs(spec, tokens, monkeypatch):
    """All but the decoding of embeddings and of small matrices."""
    asked: set[tuple] = set()
    monkeypatch.setattr(path, "compile_together", lambda wanted, others: asked.update(wanted))
    with Model(SyntheticSource(spec), "cpu", precision="int8") as model:
        state = model.new_state(64)
        steps = model._steps
        assert steps is not None
        steps.compile_ahead(state, tokens)
        compiled: dict[tuple, object] = {}
        monkeypatch.setattr(operations, "_compiled", compiled)
        model.extend(list(range(tokens)), state)
        list(model.follow(5, state, 2, Sampling()))
    used = {name for _, name in compiled}
    others = {name for name in used - {name for _, name in asked} if "decode_rows" not in name}
    assert len(asked) > 10 and not others


def test_what_is_prepared_is_there(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("this was not prepared")

    with Model(SyntheticSource("llama-tiny:IQ4_K"), "cpu", precision="int8") as model:
        state = model.new_state(64)
        model.prepare(state, 24)
        for name in ("StepProgram", "compile_together"):
            monkeypatch.setattr(path, name, refuse)
        model.extend(list(range(24)), state)
        assert len(list(model.follow(5, state, 2, Sampling()))) == 2


def test_a_rehearsal_compiles_nothing():
    def template(arguments, thread, threads):
        raise NotImplementedError

    with operations.rehearsed() as wanted:
        assert operations.operation(template, "never") == 0
    assert [name for _, name in wanted] == ["never"]
    assert operations._rehearsal.wanted is None


def test_code_in_a_private_folder_is_not_compiled_ahead(monkeypatch):
    from numba.core.ccallback import CFunc

    def refuse(self):
        raise RuntimeError

    def template(arguments, thread, threads):
        raise NotImplementedError

    assert not compiling.is_on_disk(template, operations.SIGNATURE)
    monkeypatch.setattr(CFunc, "enable_caching", refuse)
    assert compiling.is_on_disk(template, operations.SIGNATURE)

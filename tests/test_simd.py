"""Products of encoded matrices on the CPU, and the threads that compute them."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import pytest
import torch
from iqforge.formats.codecs import codec
from iqforge.formats.types import TYPES, ggml_type
from iqforge.runtime.bench.random_blocks import supported
from iqforge.runtime.simd import vectors as v
from iqforge.runtime.simd.operations import _announce, operation
from iqforge.runtime.simd.products import Rows, plain_rows, plain_type
from iqforge.runtime.simd.threads import Program, _threads, run
from iqforge.runtime.simd.units import UNITS

from .stored_rows import COLUMNS, of_types, stored


def known(name: str) -> bool:
    """Return whether the type is in files: some units are of rows that are always interleaved."""
    return name in TYPES and supported(name)


def decoded(rows: Rows, threads: int = 2) -> np.ndarray:
    out = np.empty((len(rows.data), rows.n_cols), dtype=np.float32)
    run(Program([rows.decoding(out.ctypes.data)]), threads)
    return out


def multiplied(rows: Rows, x: np.ndarray, threads: int = 2) -> np.ndarray:
    y = np.full(len(rows.data), np.nan, dtype=np.float32)
    run(Program([rows.multiplication(x.ctypes.data, y.ctypes.data)]), threads)
    return y


def test_every_type_of_weights_has_a_unit():
    assert [n for n in codec.decodable_types() if plain_type(ggml_type(n)).name not in UNITS] == []


@pytest.mark.parametrize("name", of_types(codec.decodable_types()))
def test_decoded_rows_are_those_of_the_codec(name):
    """Bit for bit, also of interleaved types."""
    type, data = ggml_type(name), stored(name)
    rows = Rows(plain_type(type), np.ascontiguousarray(plain_rows(type, data, COLUMNS)), COLUMNS)
    expected = codec.decode(type, data, COLUMNS, as_weights=True)
    assert np.array_equal(decoded(rows).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", of_types([name for name in UNITS if known(name)]))
def test_products_are_those_of_the_decoded_rows(name):
    type = ggml_type(name)
    data = stored(name)
    data = np.ascontiguousarray(plain_rows(type, data, COLUMNS))
    rows = Rows(type, data, COLUMNS)
    x = np.random.default_rng(3).standard_normal(COLUMNS).astype(np.float32)
    weights = decoded(rows).astype(np.float64)
    error = np.abs(multiplied(rows, x) - weights @ x)
    assert (error <= 1e-6 * (np.abs(weights) @ np.abs(x)) + 1e-30).all()
    for column in (0, 31, 47, 200, 300, COLUMNS - 1):  # a product with one weight is exact
        one = np.zeros(COLUMNS, dtype=np.float32)
        one[column] = 1
        assert np.array_equal(multiplied(rows, one), weights[:, column].astype(np.float32))
    alone = multiplied(rows, x, 1)
    assert np.array_equal(alone, multiplied(rows, x, 3))  # whatever the number of threads


def test_parts_of_rows_share_the_memory():
    rows = Rows(ggml_type("Q8_0"), stored("Q8_0", 12), COLUMNS)
    assert np.array_equal(decoded(rows.part(3, 9)), decoded(rows)[3:9])


def test_programs_run_in_order_on_any_number_of_threads():
    """Each operation reads what the one before has written, on whatever thread."""
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(30)]
    x = [rng.standard_normal(64).astype(np.float32)]
    x += [np.zeros(64, np.float32) for _ in matrices]
    operations = [
        Rows(ggml_type("F32"), matrix.view(np.uint8), 64).multiplication(
            x[i].ctypes.data, x[i + 1].ctypes.data
        )
        for i, matrix in enumerate(matrices)
    ]
    program, found = Program(operations), []
    for threads in (1, 2, 3, 5):
        for _ in range(20):
            x[-1][:] = 0
            run(program, threads)
            found.append(x[-1].copy())
    assert all(np.array_equal(y, found[0]) for y in found)
    expected = x[0].astype(np.float64)
    for matrix in matrices:
        expected = matrix @ expected
    assert np.allclose(found[0], expected, atol=1e-5)


def _counted(arguments, thread, threads):
    """Add 1 to the number of the thread."""
    count = v.integer_at(arguments) + 8 * thread
    v.store_integer(count, v.integer_at(count) + 1)


def test_threads_of_python_take_turns():
    """Programs of several callers do not mix."""
    rows = Rows(ggml_type("F32"), np.eye(64, dtype=np.float32).view(np.uint8), 64)
    wrong = []

    def work(number: int) -> None:
        x, y = np.full(64, number, np.float32), np.zeros(64, np.float32)
        program = Program([rows.multiplication(x.ctypes.data, y.ctypes.data)] * 5)
        for _ in range(50):
            y[:] = 0
            run(program, 2)
            if (y != number).any():
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(1, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.parametrize("after", ["_publish", "_lead"])
def test_a_program_that_is_interrupted_runs_to_its_end_once(monkeypatch, after):
    rows = Rows(ggml_type("F32"), np.eye(64, dtype=np.float32).view(np.uint8), 64)
    x, y, calls = np.arange(64, dtype=np.float32), np.zeros(64, np.float32), []
    multiply = rows.multiplication(x.ctypes.data, y.ctypes.data)
    count, counts = operation(_counted), np.zeros(3, np.int64)
    program = Program([multiply, (count, np.array([counts.ctypes.data]))])
    pool = _threads(os.getpid(), 3)
    real = getattr(pool, after)

    def interrupted(*arguments):
        real(*arguments)
        calls.append(arguments)
        if len(calls) < 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool, after, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(program)
    assert len(calls) == 3 and counts.tolist() == [1, 1, 1] and np.array_equal(x, y)
    pool.run(program)
    assert counts.tolist() == [2, 2, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_its_own_threads():
    rows = Rows(ggml_type("F32"), np.eye(64, dtype=np.float32).view(np.uint8), 64)
    x = np.arange(64, dtype=np.float32)
    assert np.array_equal(multiplied(rows, x), x)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(multiplied(rows, x), x) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_few_rows_are_multiplied_as_they_are_stored(tmp_path):
    """The same logits as with decoded matrices; replaced tensors are seen at once."""
    from iqforge.runtime.bench.synthetic import SyntheticSource
    from iqforge.runtime.model import Model
    from iqforge.runtime.state.cache import CacheSettings

    model = Model(SyntheticSource("llama-tiny:IQ4_K_R4"))
    state = model.new_state(16, CacheSettings("f32", "f32"))
    tokens = torch.arange(1, 9)
    at_once = model.forward(tokens)
    steps = torch.stack([model.extend([int(t)], state) for t in tokens])
    assert (at_once - steps).abs().max() < 1e-4 * at_once.abs().max()
    store, name = model.weights.store, "blk.0.ffn_up.weight"
    tensor = next(t for t in model.source.tensors if t.name == name)
    assert store.kept(tensor) is not None
    zeros = np.zeros((tensor.n_rows, ggml_type("Q8_0").row_bytes(tensor.n_cols)), np.uint8)
    store.replace(name, ggml_type("Q8_0"), zeros)
    [matrix] = store.matrices([tensor], 1)
    x = torch.randn(2, tensor.n_cols)
    found = matrix.few(x)
    assert found is not None and not found.any()
    store.restore(name)
    again = matrix.few(x)
    assert again is not None and again.any()


def test_without_memory_matrices_are_decoded_from_the_file(monkeypatch):
    from iqforge.runtime.bench.synthetic import SyntheticSource
    from iqforge.runtime.model import Model
    from iqforge.runtime.weights import store

    expected = Model(SyntheticSource("llama-tiny:Q4_K")).forward([1, 2])
    monkeypatch.setattr(store, "available_memory", lambda: 1000)
    model = Model(SyntheticSource("llama-tiny:Q4_K"))
    assert model.weights.store.kept(model.source.tensors[0]) is None
    assert torch.allclose(model.forward([1, 2]), expected, atol=1e-4)


def test_compiling_is_announced_once(caplog):
    _announce.cache_clear()

    def nothing(arguments, thread, threads):
        return

    name = f"nothing_{os.getpid()}_{threading.get_ident()}_{os.urandom(4).hex()}"
    with caplog.at_level(logging.INFO):
        operation(nothing, name)
        operation(nothing, f"{name}_again")
    assert [r.message.startswith("compiling") for r in caplog.records] == [True]

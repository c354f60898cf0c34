"""Writing in the background: in order, within bounds, while the workers continue; errors are not
lost.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from iqforge.errors import OutputError
from iqforge.formats.source import Source, TensorInfo
from iqforge.formats.types import ggml_type
from iqforge.quantize.run.background import BackgroundWriter
from iqforge.quantize.run.stream import RunOutput, stream

from .uniform_plan import plan_uniform


class Model(Source):
    """Sixty tensors of rows that are all ones."""

    path, files, metadata = "model", (), {}
    tensors = tuple(
        TensorInfo(f"blk.{i}.ffn_up.weight", (8, 256), ggml_type("F32")) for i in range(60)
    )

    def __init__(self):
        self.read, self.enough = 0, threading.Event()

    def read_rows(self, tensor, start, stop):
        self.read += 1
        if self.read == 50:
            self.enough.set()
        return np.ones((stop - start, 256), np.float32).view(np.uint8)


def test_workers_continue_while_the_disk_pauses():
    model, written = Model(), []

    class Pausing:
        def write(self, tensor, data):
            if not written:
                assert model.enough.wait(120), (
                    "no more was read while the first write took its time"
                )
            written.append(tensor.name)

    stream(model, [RunOutput(plan_uniform(model.tensors, ggml_type("Q4_0")), Pausing())], threads=1)
    assert written == [tensor.name for tensor in model.tensors]


def test_error_of_the_sink_ends_the_run():
    model, before = Model(), set(threading.enumerate())

    class Full:
        count = 0

        def write(self, tensor, data):
            self.count += 1
            if self.count > 3:
                raise OutputError("no space")

    sink, done = Full(), []
    with pytest.raises(OutputError, match="no space"):
        stream(
            model,
            [
                RunOutput(
                    plan_uniform(model.tensors, ggml_type("Q4_0")), sink, tensor_done=done.append
                )
            ],
            threads=2,
        )
    assert sink.count == 4 and len(done) == 3 and set(threading.enumerate()) <= before


def test_no_more_waits_than_may():
    open_gate, taken = threading.Event(), []

    def take(number):
        open_gate.wait(120)
        taken.append(number)

    with BackgroundWriter(100) as writer:
        for number in range(2):
            writer.put(40, lambda number=number: take(number))
        more = threading.Thread(
            target=lambda: [writer.put(40, lambda number=number: take(number)) for number in (2, 3)]
        )
        more.start()
        time.sleep(0.05)
        assert more.is_alive() and writer._waiting_bytes == 80
        open_gate.set()
        more.join(240)
        writer.put(1000, lambda: take(4))  # more than the bound, when nothing else waits
    assert taken == [0, 1, 2, 3, 4]


def test_last_error_is_raised_at_the_end():
    def fail():
        raise OutputError("late")

    with pytest.raises(OutputError, match="late"), BackgroundWriter() as writer:
        writer.put(1, fail)
    with pytest.raises(KeyError), BackgroundWriter() as writer:
        writer.put(1, fail)
        raise KeyError("the first one")

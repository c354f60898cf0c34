"""A CPU that runs out of memory is an error with a name."""

from __future__ import annotations

import pytest
import torch
from iqforge.errors import DeviceError, ShapeError
from iqforge.runtime.memory import named_errors

CPU = torch.device("cpu")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**58), lambda: bytearray(2**62)])
def test_too_little_memory_is_named(allocate):
    said = r"^a.gguf: the CPU ran out of memory: evaluate fewer tokens at a time \(-ub, -b, -c\)$"
    with pytest.raises(DeviceError, match=said), named_errors(CPU, "a.gguf"):
        allocate()


@pytest.mark.parametrize("error", [RuntimeError("another"), ShapeError("rows of 3")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error)), named_errors(CPU, "a.gguf"):
        raise error

"""What all tests need."""

from __future__ import annotations

import signal

import pytest

# A shell's background job ignores Ctrl-C, and so would the children that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def gpu(request):
    """Skip without a device that numba can compile for; else compile what the tests ask for, in
    several processes.
    """
    from .encode_cases import TYPES, compile_side_by_side, reason_to_skip

    if reason := reason_to_skip():
        pytest.skip(reason)
    asked = {
        value
        for item in request.session.items
        if "gpu" in item.fixturenames and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if value in TYPES
    }
    if len(asked) > 2:
        compile_side_by_side(sorted(asked))

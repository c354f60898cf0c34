"""Starting the CUDA driver early, without a GPU."""

from types import SimpleNamespace

import pytest
from iqforge.runtime import driver


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of a driver that has two devices."""
    seen = []

    def get(device, number):
        seen.append(f"get {number}")
        return 0 if number < 2 else 101

    def retain(context, device):
        seen.append("retain")
        return 0

    def init(flags):
        seen.append("init")
        return 0

    library = SimpleNamespace(cuInit=init, cuDeviceGet=get, cuDevicePrimaryCtxRetain=retain)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    return seen


@pytest.mark.parametrize("device, number", [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_context_of_the_device_is_made(calls, device, number):
    thread = driver.start_driver(device)
    assert thread is not None and thread.daemon
    thread.join()
    assert calls == ["init", f"get {number}", "retain"]


def test_a_device_that_does_not_exist_is_left_to_torch(calls):
    thread = driver.start_driver("cuda:7")
    assert thread is not None
    thread.join()
    assert calls == ["init", "get 7"]


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "meta", ""])
def test_other_devices_start_nothing(calls, device):
    assert driver.start_driver(device) is None and not calls


def test_a_host_without_a_driver(monkeypatch, recwarn):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    thread = driver.start_driver("auto")
    assert thread is not None
    thread.join()
    assert not recwarn.list  # a thread that fails warns

"""Start the CUDA driver while torch is being imported: each takes a while, and neither needs the
other.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

_LIBRARY = "libcuda.so.1"


def start_driver(device: str) -> threading.Thread | None:
    """Make the context that torch will use on `device` ("auto", "cuda" or "cuda:N"), in a thread
    that is returned; None for another device.

    Nothing happens where there is no driver or no such device: torch says so when it is asked.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdecimal():
        return None
    thread = threading.Thread(
        target=_make_context, args=(int(number or "0"),), name="cuda-driver", daemon=True
    )
    thread.start()
    return thread


def _make_context(number: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL(_LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        # The primary context of a device, which torch's runtime library uses too.
        _ = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), number)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )

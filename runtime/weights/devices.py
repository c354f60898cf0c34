"""What `--device` means to the runtime: cpu, one CUDA device, or auto."""

from __future__ import annotations

import re

import torch

from ...errors import UsageError, printable

SPELLINGS = "cpu, cuda, cuda:N or auto"


def usable_device(device: str | torch.device) -> torch.device:
    """The device, with its number. "auto" is the first GPU where there is one, else the CPU; "cuda"
    the current GPU.

    UsageError for another spelling, and for a device that does not exist; it lists those that do.
    """
    text = str(device)
    if text == "auto":
        text = "cuda:0" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", text)
    if not found:
        several = ": models run on one GPU" if re.fullmatch(r"cuda:\d+(,\d+)+", text) else ""
        raise UsageError(f"device '{printable(text, 40)}' cannot be used{several}; use {SPELLINGS}")
    if text == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = torch.cuda.current_device() if count and found[1] is None else int(found[1] or 0)
    if number >= count:
        raise UsageError(f"there is no device '{text}': {present()}")
    device = torch.device("cuda", number)
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        raise UsageError(
            f"device '{device}' cannot be used: {str(error).splitlines()[0]}"
        ) from None
    return device


def present() -> str:
    """List the devices of this machine."""
    if not torch.cuda.is_available():
        why = "" if torch.backends.cuda.is_built() else ", as this torch is built without CUDA"
        return f"here is only cpu{why}"
    return "here are cpu, " + ", ".join(
        f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())
    )

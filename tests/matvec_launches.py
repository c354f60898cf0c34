"""Launches of matrix-vector products without a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from iqforge.cuda_kernels.matvec import expert_operands, experts, operands, products
from iqforge.cuda_kernels.matvec.plan import DeviceLimits


def replace_launches(monkeypatch, here: DeviceLimits, launch: Callable) -> None:
    """Call launch(spec, grid, block, *arguments, shared, pdl) instead of launching, for tensors of
    the CPU and a device with these limits.
    """
    for module in (products, experts, operands):
        monkeypatch.setattr(module, "limits", lambda device: here)
        monkeypatch.setattr(module, "device_index", lambda device: 0)
    for module in (products, experts):
        monkeypatch.setattr(module, "function", lambda spec, name, device: spec)
        monkeypatch.setattr(module, "launch", launch)
    for module in (products, experts, expert_operands):
        monkeypatch.setattr(module, "check_tensor", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

"""The precisions that a model can be evaluated in."""

from __future__ import annotations

import torch

from ..errors import UsageError, printable

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# int8: products in 8 bits, on the CPU those with quantized weights (`simd.tiles`, `simd.dots`), on
# a GPU dense ones of prompts (`cuda.prompt.common.rounded`), with all else in bfloat16.
ON_CPU = ("f32", "int8")
ON_GPU = (*PRECISIONS, "int8")


def precisions_of(device: torch.device) -> tuple[str, ...]:
    """Return the precisions that a model on `device` can have."""
    return ON_CPU if device.type == "cpu" else ON_GPU


def activations(precision: str) -> torch.dtype:
    """Return the type of activations on a GPU."""
    return PRECISIONS.get(precision, torch.bfloat16)


def fastest_precision(device: torch.device) -> str:
    """Return the default of commands that generate, and of those that measure how fast that is."""
    return "int8" if device.type == "cpu" else "bf16"


def collecting_precision(device: torch.device) -> str:
    """Return the default of commands that collect statistics of inputs: on a GPU float16, which
    rounds eight times more finely than bfloat16 at the same speed.
    """
    return "f32" if device.type == "cpu" else "f16"


def usable_precision(precision: str | None, device: torch.device) -> str:
    """Return the precision of a model on `device`, None being the default there. Raise UsageError
    for an unknown one, and for one that the device has no kernels for.
    """
    if device.type == "cuda":
        # No TF32 at any precision: observers see float32 products.
        torch.set_float32_matmul_precision("highest")
    if precision is None:
        return "f32" if device.type == "cpu" else "bf16"
    known = dict.fromkeys((*PRECISIONS, *ON_CPU))
    if precision not in known:
        raise UsageError(
            f"precision '{printable(precision, 40)}' is not known; known are {', '.join(known)}"
        )
    if precision not in (usable := precisions_of(device)):
        raise UsageError(
            f"precision {precision} is not for {device}, where it can be {' or '.join(usable)}"
        )
    return precision
